{{- define "headrace.name" -}}
{{- if contains "headrace" .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-headrace" (.Release.Name | trunc 41 | trimSuffix "-") -}}
{{- end -}}
{{- end -}}

{{- define "headrace.selector" -}}
app.kubernetes.io/name: headrace
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "headrace.labels" -}}
{{ include "headrace.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end -}}

{{- define "headrace.toml.key" -}}
{{- if regexMatch "^[A-Za-z0-9_-]+$" . -}}{{ . }}{{- else -}}{{ toJson . }}{{- end -}}
{{- end -}}

{{- /* A value of TOML. Helm's toToml writes 8000 as 8000.0, which is no port. */ -}}
{{- define "headrace.toml.value" -}}
{{- if kindIs "map" . -}}
{{- $items := list -}}
{{- range $key, $each := . -}}
{{- if not (kindIs "invalid" $each) -}}
{{- $items = append $items (printf "%s = %s" (include "headrace.toml.key" $key) (include "headrace.toml.value" $each)) -}}
{{- end -}}
{{- end -}}
{ {{- join ", " $items -}} }
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}
{{- $items = append $items (include "headrace.toml.value" .) -}}
{{- end -}}
[{{- join ", " $items -}}]
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- /* headrace.toml: a table for each section, and inline tables below it. */ -}}
{{- define "headrace.toml" -}}
{{- range $key, $section := .Values.config -}}
{{- if kindIs "map" $section }}
[{{ include "headrace.toml.key" $key }}]
{{- range $name, $each := $section }}
{{- if not (kindIs "invalid" $each) }}
{{ include "headrace.toml.key" $name }} = {{ include "headrace.toml.value" $each }}
{{- end }}
{{- end }}
{{ else if kindIs "slice" $section -}}
{{- range $section }}
[[{{ include "headrace.toml.key" $key }}]]
{{- range $name, $each := . }}
{{- if not (kindIs "invalid" $each) }}
{{ include "headrace.toml.key" $name }} = {{ include "headrace.toml.value" $each }}
{{- end }}
{{- end }}
{{ end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "headrace.metrics" -}}
{{- .Values.config.server.internal_port | default .Values.config.server.port | int -}}
{{- end -}}

{{- define "headrace.metricsPort" -}}
{{- if .Values.config.server.internal_port -}}internal{{- else -}}http{{- end -}}
{{- end -}}

{{- define "headrace.secret" -}}
{{- .Values.secret.existing | default (include "headrace.name" .) -}}
{{- end -}}

{{- define "headrace.scaled" -}}
{{- if or .Values.autoscaling.enabled .Values.keda.enabled -}}true{{- end -}}
{{- end -}}

{{- /* What cannot work together. */ -}}
{{- define "headrace.check" -}}
{{- if and .Values.autoscaling.enabled .Values.keda.enabled -}}
{{- fail "autoscaling.enabled and keda.enabled are both true. Enable one: KEDA creates an autoscaler of its own." -}}
{{- end -}}
{{- $many := or (include "headrace.scaled" .) (gt (int .Values.replicas) 1) -}}
{{- if and $many .Values.persistence.state.enabled -}}
{{- fail "persistence.state is for one pod. With several pods, set config.ledger.store and config.admin.store to postgres (see values-shared.yaml) and persistence.state.enabled to false." -}}
{{- end -}}
{{- if and $many .Values.persistence.cache.enabled (not .Values.persistence.cache.existingClaim) (not (has "ReadWriteMany" .Values.persistence.cache.accessModes)) -}}
{{- fail "persistence.cache is shared by all pods. With several pods, set persistence.cache.accessModes to [ReadWriteMany]." -}}
{{- end -}}
{{- if and .Values.secret.existing .Values.secret.values -}}
{{- fail "secret.existing and secret.values are both set. Set one." -}}
{{- end -}}
{{- if not (or .Values.secret.existing .Values.secret.values) -}}
{{- fail "No secret. Create one with the variables that the configuration names, such as HEADRACE_OPS_KEY, and set secret.existing to its name." -}}
{{- end -}}
{{- end -}}

{{- define "headrace.environment" -}}
envFrom:
  - secretRef: {name: {{ include "headrace.secret" . }}}
{{- with .Values.env }}
env:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "headrace.securityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "headrace.mounts" -}}
- {name: config, mountPath: /etc/headrace, readOnly: true}
- {name: state, mountPath: {{ .Values.config.storage.folder }}}
- {name: cache, mountPath: /var/cache/headrace}
- {name: tmp, mountPath: /tmp}
{{- if .Values.persistence.models.existingClaim }}
- {name: models, mountPath: {{ .Values.persistence.models.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}
