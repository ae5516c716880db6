{{/* Names and labels. The operator's own labels differ from those of the pods that it makes: its selectors never match them. */}}

{{- define "heteroinference.name" -}}
{{- default "heteroinference" .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "heteroinference.fullname" -}}
{{- $name := include "heteroinference.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Deployment, Lease, roles and all else of the operator. */}}
{{- define "heteroinference.operator" -}}
{{- printf "%s-operator" (include "heteroinference.fullname" .) -}}
{{- end -}}

{{/* Objects of the cluster's scope: two releases in two namespaces may have the same name. */}}
{{- define "heteroinference.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "heteroinference.operator" .) -}}
{{- end -}}

{{- define "heteroinference.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "heteroinference.operator" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- required "serviceAccount.name is needed where serviceAccount.create is false" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The operator's pods. */}}
{{- define "heteroinference.selector" -}}
app.kubernetes.io/name: heteroinference-operator
app.kubernetes.io/instance: {{ .Release.Name | quote }}
app.kubernetes.io/component: operator
{{- end -}}

{{/*
Labels of an object: (dict "root" . "component" "operator" "more" .Values.podLabels). The chart's own win over the user's,
because selectors are made of them.
*/}}
{{- define "heteroinference.labels" -}}
{{- $own := dict
  "app.kubernetes.io/name" "heteroinference-operator"
  "app.kubernetes.io/instance" .root.Release.Name
  "app.kubernetes.io/component" .component
  "app.kubernetes.io/version" .root.Chart.AppVersion
  "app.kubernetes.io/part-of" "heteroinference"
  "app.kubernetes.io/managed-by" .root.Release.Service
  "helm.sh/chart" (printf "%s-%s" .root.Chart.Name (.root.Chart.Version | replace "+" "_")) -}}
{{- toYaml (merge $own (default dict .more) .root.Values.commonLabels) -}}
{{- end -}}

{{/* An image: (dict "root" . "image" .Values.images.operator). */}}
{{- define "heteroinference.image" -}}
{{- $registry := .root.Values.images.registry | trimSuffix "/" -}}
{{- $name := ternary .image.repository (printf "%s/%s" $registry .image.repository) (empty $registry) -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $name .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* Stops where an API that a value asks for is not there: (dict "root" . "value" "metrics.serviceMonitor.enabled"). */}}
{{- define "heteroinference.requirePrometheusOperator" -}}
{{- if not (.root.Capabilities.APIVersions.Has "monitoring.coreos.com/v1") -}}
{{- fail (printf "%s needs the API monitoring.coreos.com/v1 of the Prometheus operator, which this cluster does not have (without a cluster, say --api-versions monitoring.coreos.com/v1)" .value) -}}
{{- end -}}
{{- end -}}

{{/* What every container of the chart may do: nothing (Pod Security "restricted"). */}}
{{- define "heteroinference.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}

{{- define "heteroinference.podSecurity" -}}
runAsNonRoot: true
{{- with .Values.runAsUser | int64 }}
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
{{- end }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}
