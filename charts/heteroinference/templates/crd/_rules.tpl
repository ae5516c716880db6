{{/*
Take out of a schema, in place, what servers do not know: CEL rules before Kubernetes 1.25, their `reason` and `fieldPath`
before 1.28. Helm refuses to send fields that the server does not know. Where a rule is missing, the operator tells of the
same mistake with the same words, in the condition Accepted.
*/}}
{{- define "heteroinference.withoutRules" -}}
{{- if kindIs "map" . -}}
{{- $_ := unset . "x-kubernetes-validations" -}}
{{- range . -}}{{- include "heteroinference.withoutRules" . -}}{{- end -}}
{{- else if kindIs "slice" . -}}
{{- range . -}}{{- include "heteroinference.withoutRules" . -}}{{- end -}}
{{- end -}}
{{- end -}}

{{/* `reason` and `fieldPath` only within rules: a status has a field `reason` of its own. */}}
{{- define "heteroinference.withPlainRules" -}}
{{- if kindIs "map" . -}}
{{- range $key, $value := . -}}
{{- if eq $key "x-kubernetes-validations" -}}
{{- range $value -}}{{- $_ := unset . "reason" -}}{{- $_ := unset . "fieldPath" -}}{{- end -}}
{{- else -}}
{{- include "heteroinference.withPlainRules" $value -}}
{{- end -}}
{{- end -}}
{{- else if kindIs "slice" . -}}
{{- range . -}}{{- include "heteroinference.withPlainRules" . -}}{{- end -}}
{{- end -}}
{{- end -}}
