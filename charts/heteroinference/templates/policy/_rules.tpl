{{/* CEL: the value of a field below spec, '' where it is left out; gets its path. */}}
{{- define "heteroinference.valueOf" -}}
{{- $path := "object.spec" -}}
{{- $has := list -}}
{{- range splitList "." . -}}
{{- $path = printf "%s.%s" $path . -}}
{{- $has = append $has (printf "has(%s)" $path) -}}
{{- end -}}
({{ join " && " $has }} ? {{ $path }} : '')
{{- end -}}

{{/* CEL: what lies below a variable, or something else where it is left out; gets from, path and else. */}}
{{- define "heteroinference.below" -}}
{{- $path := .from -}}
{{- $has := list -}}
{{- range splitList "." .path -}}
{{- $path = printf "%s.%s" $path . -}}
{{- $has = append $has (printf "has(%s)" $path) -}}
{{- end -}}
({{ join " && " $has }} ? {{ $path }} : {{ .else }})
{{- end -}}

{{/*
Entries for one kind of name in the pod patches of the gateway and of pools; gets list, within (path of a list in the
pod, or of one more in it) and path. Each entry also has `each`, in which @ stands for the test of its names. A null in
place of a list or a name cannot be judged, which refuses the resource.
*/}}
{{- define "heteroinference.patchFields" -}}
{{- $gateway := include "heteroinference.below" (dict "from" "object.spec" "path" "gateway.podTemplate.spec" "else" "{}") -}}
{{- $pool := include "heteroinference.below" (dict "from" "pool" "path" "podTemplate.spec" "else" "{}") -}}
{{- $pods := dict "spec.gateway" (printf "[%s]" $gateway) "spec.pools[]" (printf "object.spec.pools.map(pool, %s)" $pool) -}}
{{- $each := "@" -}}
{{- $from := "pod" -}}
{{- $field := "" -}}
{{- range $index, $items := .within -}}
{{- $item := printf "item%d" $index -}}
{{- $found := include "heteroinference.below" (dict "from" $from "path" $items "else" "[]") -}}
{{- $each = $each | replace "@" (printf "%s.all(%s, @)" $found $item) -}}
{{- $from = $item -}}
{{- $field = printf "%s%s[]." $field $items -}}
{{- end -}}
{{- $names := printf "[%s]" (include "heteroinference.below" (dict "from" $from "path" .path "else" "''")) -}}
{{- $list := .list -}}
{{- $path := .path -}}
{{- range $part, $found := $pods }}
- {list: {{ $list }}, field: {{ printf "%s.podTemplate.spec.%s%s" $part $field $path | quote }}, each: {{ printf "%s.all(pod, %s)" $found $each | quote }}, names: {{ $names | quote }}}
{{- end }}
{{- end -}}

{{/*
Fields of a HeteroInference that name something: the list of .Values.policy that is about it, and CEL for the names.
hetero_operator/reconcile/policy.py has the same fields; a test compares what both refuse.
*/}}
{{- define "heteroinference.policyFields" -}}
{{- $uris := list
  (dict "field" "spec.model.uri" "from" "[object.spec.model.uri]")
  (dict "field" "spec.engine.speculative.draft.uri" "from" (printf "[%s]" (include "heteroinference.valueOf" "engine.speculative.draft.uri")))
  (dict "field" "spec.engine.adapters.load[].uri" "from" (printf "%s.map(adapter, has(adapter.uri) ? adapter.uri : '')" (include "heteroinference.below" (dict "from" "object.spec" "path" "engine.adapters.load" "else" "[]")))) }}
{{- range $uris }}
- {list: hostPaths, field: {{ .field | quote }}, names: {{ printf "%s.map(uri, uri.startsWith('file://') ? uri.substring(7, size(uri)) : '')" .from | quote }}}
- {list: images, field: {{ .field | quote }}, names: {{ printf "%s.map(uri, uri.startsWith('oci://') ? uri.substring(6, size(uri)) : '')" .from | quote }}}
{{- end }}
{{- $fields := dict
  "hostPaths" (list "model.cache.hostPath" "exchange.hostPath")
  "images" (list "images.gpuWorker" "images.cpuWorker" "images.gateway" "images.router")
  "secrets" (list "model.tokenSecretRef.name" "gateway.tls.secretName" "gateway.tls.clientCASecretName"
                  "gateway.auth.keysSecretRef.name" "monitoring.keySecretRef.name" "router.keysSecretRef.name"
                  "router.tlsSecretName")
  "priorityClasses" (list "scheduling.priorityClassName")
  "schedulers" (list "scheduling.schedulerName") }}
{{- range $list, $paths := $fields }}
{{- range $paths }}
- {list: {{ $list }}, field: spec.{{ . }}, names: {{ printf "[%s]" (include "heteroinference.valueOf" .) | quote }}}
{{- end }}
{{- end }}
- {list: schedulers, field: spec.scheduling.gang.scheduler, names: {{ printf "[%s == '' && %s == 'Volcano' ? 'volcano' : '']" (include "heteroinference.valueOf" "scheduling.schedulerName") (include "heteroinference.valueOf" "scheduling.gang.scheduler") | quote }}}
- {list: secrets, field: spec.images.pullSecrets, names: "(has(object.spec.images) && has(object.spec.images.pullSecrets) ? object.spec.images.pullSecrets : [])"}
- {list: runtimeClasses, field: "spec.pools[].gpu.runtimeClassName", names: "object.spec.pools.map(pool, has(pool.gpu) && has(pool.gpu.runtimeClassName) ? pool.gpu.runtimeClassName : '')"}
- {list: secrets, field: "spec.gateway.volumes[].secretName", each: {{ printf "%s.all(volume, @)" (include "heteroinference.below" (dict "from" "object.spec" "path" "gateway.volumes" "else" "[]")) | quote }}, names: {{ printf "[%s]" (include "heteroinference.below" (dict "from" "volume" "path" "secretName" "else" "''")) | quote }}}
- {list: secrets, field: "spec.pools[].volumes[].secretName", each: {{ printf "object.spec.pools.all(pool, %s.all(volume, @))" (include "heteroinference.below" (dict "from" "pool" "path" "volumes" "else" "[]")) | quote }}, names: {{ printf "[%s]" (include "heteroinference.below" (dict "from" "volume" "path" "secretName" "else" "''")) | quote }}}
{{- $patches := list
  (dict "list" "hostPaths" "within" (list "volumes") "path" "hostPath.path")
  (dict "list" "images" "within" (list "containers") "path" "image")
  (dict "list" "images" "within" (list "initContainers") "path" "image")
  (dict "list" "images" "within" (list "volumes") "path" "image.reference")
  (dict "list" "secrets" "within" (list "volumes") "path" "secret.secretName")
  (dict "list" "secrets" "within" (list "volumes") "path" "csi.nodePublishSecretRef.name")
  (dict "list" "secrets" "within" (list "volumes" "projected.sources") "path" "secret.name")
  (dict "list" "secrets" "within" (list "imagePullSecrets") "path" "name")
  (dict "list" "secrets" "within" (list "containers" "env") "path" "valueFrom.secretKeyRef.name")
  (dict "list" "secrets" "within" (list "initContainers" "env") "path" "valueFrom.secretKeyRef.name")
  (dict "list" "secrets" "within" (list "containers" "envFrom") "path" "secretRef.name")
  (dict "list" "secrets" "within" (list "initContainers" "envFrom") "path" "secretRef.name")
  (dict "list" "priorityClasses" "within" list "path" "priorityClassName")
  (dict "list" "schedulers" "within" list "path" "schedulerName")
  (dict "list" "runtimeClasses" "within" list "path" "runtimeClassName") }}
{{- range $patches }}
{{- include "heteroinference.patchFields" . }}
{{- end }}
{{- end -}}

{{/* CEL: whether `name` is one of some folders, or below one. */}}
{{- define "heteroinference.inFolders" -}}
{{- $tests := list -}}
{{- range . -}}
{{- $folder := trimSuffix "/" . -}}
{{- $tests = append $tests (printf "name == '%s' || name.startsWith('%s/')" $folder $folder) -}}
{{- end -}}
!name.matches('(^|/)[.][.](/|$)') && ({{ join " || " (default (list "false") $tests) }})
{{- end -}}

{{/* CEL: whether `name` is like an entry of a list; of an oci:// model it has #PATH at its end. */}}
{{- define "heteroinference.inPatterns" -}}
{{- $tests := list -}}
{{- range . -}}
{{- $tests = append $tests (printf "name.matches('^%s(#.*)?$')" (. | replace "." "[.]" | replace "*" ".*")) -}}
{{- end -}}
{{- join " || " (default (list "false") $tests) -}}
{{- end -}}
