{{- /* A value as TOML: JSON, but for tables. */ -}}
{{- define "fleetcast.toml" -}}
{{- $value := . -}}
{{- if kindIs "map" $value -}}
{ {{- range $number, $key := keys $value | sortAlpha }}{{ if $number }}, {{ end }}{{ toJson $key }} = {{ include "fleetcast.toml" (index $value $key) }}{{ end -}} }
{{- else if kindIs "slice" $value -}}
[ {{- range $number, $one := $value }}{{ if $number }}, {{ end }}{{ include "fleetcast.toml" $one }}{{ end -}} ]
{{- else -}}
{{- toJson $value -}}
{{- end -}}
{{- end }}

{{- /* config.toml of the pod with all roles, or of a replica: (dict "root" $ "replica" true). */ -}}
{{- define "fleetcast.config" -}}
{{- $root := .root -}}
{{- $values := $root.Values -}}
{{- $keys := dict "keda" "grpc_port" "external-metrics" "external_metrics_port" "trimaran" "watcher_port" -}}
{{- $api := dict "host" $values.api.host "port" (int $values.api.port) -}}
{{- range $name, $port := include "fleetcast.ports" $root | fromJson -}}
{{- $_ := set $api (index $keys $name) (int $port) -}}
{{- end -}}
{{- if $values.tls.secret -}}
{{- $_ := set $api "tls_cert" "/run/fleetcast/tls/tls.crt" -}}
{{- $_ := set $api "tls_key" "/run/fleetcast/tls/tls.key" -}}
{{- if $values.tls.clients -}}
{{- $_ := set $api "client_ca" "/run/fleetcast/tls/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- $ours := dict "api" $api -}}
{{- if .replica -}}
{{- $_ := set $api "board" (printf "%s://%s-control.%s.svc:%d/v1/board" (include "fleetcast.scheme" $root) $root.Release.Name $root.Release.Namespace (int $values.api.port)) -}}
{{- else -}}
{{- $_ := set $ours "adapters" (dict "adapter" (include "fleetcast.writers" $root | fromJsonArray)) -}}
{{- end -}}
state = "/var/lib/fleetcast/var"
{{- range $section, $content := mergeOverwrite (deepCopy $values.config) $ours }}

[{{ $section }}]
{{- range $key, $value := $content }}
{{ $key }} = {{ include "fleetcast.toml" $value }}
{{- end }}
{{- end }}
{{- end }}
