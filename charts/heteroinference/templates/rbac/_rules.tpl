{{/*
What the operator may do in a namespace that it looks after. Each verb is used: tests/cluster/test_rbac_mutations.py takes
each away and sees the operator fail. Server-side apply is `patch`, and `create` where the object is not there yet; before that
it is asked for by name (`get`), so that nothing of a stranger is taken over.
*/}}
{{- define "heteroinference.rules" -}}
- apiGroups: [heteroinference.io]
  resources: [heteroinferences]
  verbs: [get, list, watch]
- apiGroups: [heteroinference.io]
  resources: [heteroinferences/status]
  verbs: [patch]
# These go when the resource wants them no more; StatefulSets when ranks move into one pod, or out of it. All but
# NetworkPolicies and PodMonitors go with a replica that is not asked for any more, ServiceAccounts with a responder or a
# router.
- apiGroups: [""]
  resources: [serviceaccounts]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [configmaps, services]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
# A router's: to list and watch pods of its namespace, which the operator may do itself, as the API server demands.
- apiGroups: [rbac.authorization.k8s.io]
  resources: [roles, rolebindings]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [resource.k8s.io]
  resources: [resourceclaimtemplates]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [inference.networking.k8s.io]
  resources: [inferencepools]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [scheduling.volcano.sh]
  resources: [podgroups]
  verbs: [get, list, watch, create, patch, delete]
# Pods are made by StatefulSets and Deployments. The operator deletes those of old revisions and those on dead nodes.
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, delete]
# Never listed: the operator can tell the names of those that it made.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, delete]
# Its own, and Warnings about pods that wait.
- apiGroups: [""]
  resources: [events]
  verbs: [get, list, create, patch]
{{- end -}}
