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
{{- $api := dict "host" $values.api.host "port" (int $values.api.port) -}}
{{- with (include "fleetcast.ports" $root | fromJson).grpc -}}
{{- $_ := set $api "grpc_port" (int .) -}}
{{- end -}}
{{- if $values.tls.secret -}}
{{- $_ := set $api "tls_cert" "/run/fleetcast/tls/tls.crt" -}}
{{- $_ := set $api "tls_key" "/run/fleetcast/tls/tls.key" -}}
{{- if $values.tls.clients -}}
{{- $_ := set $api "client_ca" "/run/fleetcast/tls/ca.crt" -}}
{{- end -}}
{{- end -}}
{{- $ours := dict "api" $api -}}
{{- with $values.adapters.external_metrics -}}
{{- if .enabled -}}
{{- $files := "/run/fleetcast/external-metrics" -}}
{{- $rows := dict "port" (int .port) "tls_cert" (print $files "/tls.crt") "tls_key" (print $files "/tls.key") "client_ca" (print $files "/ca.crt") "names" .names -}}
{{- $_ := set $ours "external_metrics" $rows -}}
{{- end -}}
{{- end -}}
{{- if .replica -}}
{{- $_ := set $api "board" (printf "%s://%s-control.%s.svc:%d/v1/board" (include "fleetcast.scheme" $root) $root.Release.Name $root.Release.Namespace (int $values.api.port)) -}}
{{- else -}}
{{- $_ := set $ours "adapters" (dict "adapter" (include "fleetcast.writers" $root | fromJsonArray) "executor" (include "fleetcast.executors" $root | fromJsonArray)) -}}
{{- end -}}
state = "/var/lib/fleetcast/var"
{{- range $section, $content := mergeOverwrite (deepCopy $values.config) $ours }}

[{{ $section }}]
{{- range $key, $value := $content }}
{{ $key }} = {{ include "fleetcast.toml" $value }}
{{- end }}
{{- end }}
{{- end }}
