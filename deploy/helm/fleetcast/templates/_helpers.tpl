{{- define "fleetcast.selector" -}}
app.kubernetes.io/name: fleetcast
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "fleetcast.labels" -}}
{{ include "fleetcast.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- /* Names of the cluster, not of a namespace. */ -}}
{{- define "fleetcast.wide" -}}
{{ .Release.Namespace }}-{{ .Release.Name }}
{{- end }}

{{- define "fleetcast.scheme" -}}
{{ ternary "https" "http" (ne .Values.tls.secret "") }}
{{- end }}

{{- define "fleetcast.host" -}}
{{ .Release.Name }}.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "fleetcast.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* The ports other than the API's that something listens on, as JSON: {"grpc": 9090, …}. */ -}}
{{- define "fleetcast.ports" -}}
{{- $adapters := .Values.adapters -}}
{{- $ports := dict -}}
{{- if or $adapters.keda.enabled $adapters.expander.enabled -}}
{{- $_ := set $ports "grpc" (int .Values.api.grpcPort) -}}
{{- end -}}
{{- if $adapters.external_metrics.enabled -}}
{{- $_ := set $ports "metrics-api" (int $adapters.external_metrics.port) -}}
{{- end -}}
{{ toJson $ports }}
{{- end }}

{{- /* The entries of a table that are on and have a mode, as rows of the configuration. */ -}}
{{- define "fleetcast.rows" -}}
{{- $rows := list -}}
{{- range $name := keys . | sortAlpha -}}
{{- $entry := index $ $name -}}
{{- if and $entry.enabled (hasKey $entry "mode") -}}
{{- $rows = append $rows (dict "use" $name "mode" $entry.mode "options" $entry.options) -}}
{{- end -}}
{{- end -}}
{{ toJson $rows }}
{{- end }}

{{- /* The writers that are on, as rows of adapters.adapter. */ -}}
{{- define "fleetcast.writers" -}}
{{ include "fleetcast.rows" .Values.adapters }}
{{- end }}

{{- /* The executors that are on, as rows of adapters.executor. */ -}}
{{- define "fleetcast.executors" -}}
{{ include "fleetcast.rows" .Values.executors }}
{{- end }}

{{- define "fleetcast.container" -}}
name: fleetcast
image: {{ include "fleetcast.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- define "fleetcast.pod" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ range . }}
  - name: {{ . | quote }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}

{{- /* A pod is ready while it answers. Each answer states that a forecast is stale; a removed endpoint could not. */ -}}
{{- define "fleetcast.serving" -}}
ports:
  - {name: http, containerPort: {{ .Values.api.port }}}
  {{- range $name, $port := include "fleetcast.ports" . | fromJson }}
  - {name: {{ $name }}, containerPort: {{ $port }}}
  {{- end }}
{{- $scheme := include "fleetcast.scheme" . | upper }}
startupProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: 150
readinessProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /healthz, port: http, scheme: {{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "fleetcast.env" -}}
- {name: FLEETCAST_TOKENS_FILE, value: /run/fleetcast/tokens/tokens}
- {name: FLEETCAST_LOG_FORMAT, value: json}
{{- range .Values.env }}
- name: {{ .name | quote }}
  {{- if .secret }}
  valueFrom: {secretKeyRef: {name: {{ .secret | quote }}, key: {{ .key | quote }}}}
  {{- else }}
  value: {{ .value | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "fleetcast.mounts" -}}
- {name: config, mountPath: /etc/fleetcast, readOnly: true}
- {name: tokens, mountPath: /run/fleetcast/tokens, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /run/fleetcast/tls, readOnly: true}
{{- end }}
{{- if .Values.adapters.external_metrics.enabled }}
- {name: external-metrics, mountPath: /run/fleetcast/external-metrics, readOnly: true}
{{- end }}
{{- range $number, $mount := .Values.mounts }}
- {name: mount-{{ $number }}, mountPath: {{ $mount.path | quote }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "fleetcast.volumes" -}}
- {name: config, configMap: {name: {{ .Release.Name }}}}
- {name: tokens, secret: {secretName: {{ .Values.tokens.secret | quote }}, defaultMode: 0440}}
- {name: tmp, emptyDir: {}}
{{- with .Values.tls.secret }}
- {name: tls, secret: {secretName: {{ . | quote }}, defaultMode: 0440}}
{{- end }}
{{- with .Values.adapters.external_metrics }}
{{- if .enabled }}
- {name: external-metrics, secret: {secretName: {{ .secret | quote }}, defaultMode: 0440}}
{{- end }}
{{- end }}
{{- range $number, $mount := .Values.mounts }}
{{- if $mount.secret }}
- {name: mount-{{ $number }}, secret: {secretName: {{ $mount.secret | quote }}, defaultMode: 0440}}
{{- else }}
- {name: mount-{{ $number }}, configMap: {name: {{ $mount.configMap | quote }}}}
{{- end }}
{{- end }}
{{- end }}

{{- /* Refuse a gRPC answerer whose callers could never be answered: KEDA sends no token, cluster-autoscaler nothing at all. */ -}}
{{- define "fleetcast.reachable" -}}
{{- $open := (.Values.config.api | default dict).grpc_open | default list -}}
{{- $clients := and .Values.tls.secret .Values.tls.clients -}}
{{- if and .Values.adapters.keda.enabled (not $clients) (not (has "keda" $open)) -}}
{{- fail "adapters.keda is on, and no caller could be answered: KEDA sends no token. Set tls.secret and tls.clients with config.access.subjects, so that it shows a certificate, or let everybody ask: config.api.grpc_open: [keda]" -}}
{{- end -}}
{{- if and .Values.adapters.expander.enabled (or $clients (not .Values.tls.secret) (not (has "expander" $open))) -}}
{{- fail "adapters.expander is on, and no caller could be answered: the cluster-autoscaler asks by TLS, with neither token nor certificate. Set tls.secret and config.api.grpc_open: [expander], and leave tls.clients false" -}}
{{- end -}}
{{- end }}
