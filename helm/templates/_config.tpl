{{/* The configuration file of a role: shared sections, then the role's own fields over them, field by field.
     A loop and not mergeOverwrite, because that keeps the shared value where the own one is false, 0 or "". */}}
{{- define "baton.config" -}}
{{- $values := index .root.Values .role -}}
{{- $sections := ternary (list "model" "log") (list "model" "engine" "transfer" "log") (eq .role "router") -}}
{{- $config := dict -}}
{{- range $section := $sections -}}
{{- with get $.root.Values.shared.config $section -}}
{{- $_ := set $config $section (deepCopy .) -}}
{{- end -}}
{{- end -}}
{{- range $section, $fields := $values.config -}}
{{- if kindIs "map" $fields -}}
{{- $merged := default dict (get $config $section) -}}
{{- range $key, $value := $fields -}}
{{- $_ := set $merged $key $value -}}
{{- end -}}
{{- $_ := set $config $section $merged -}}
{{- else -}}
{{- $_ := set $config $section $fields -}}
{{- end -}}
{{- end -}}
{{- if ne .role "router" -}}
{{- $node := default dict $config.node -}}
{{- if not (get $node "router") -}}
{{- $_ := set $node "router" (include "baton.routerAddresses" .root) -}}
{{- end -}}
{{- $_ := set $config "node" $node -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Control address of every router replica, by its pod's stable name: a node registers with each of them. */}}
{{- define "baton.routerAddresses" -}}
{{- $args := dict "root" . "role" "router" -}}
{{- $port := include "baton.ports" $args | fromYaml | dig "control" 0 | int -}}
{{- $addresses := list -}}
{{- range $i := until (int .Values.router.replicas) -}}
{{- $pod := printf "%s-%d" (include "baton.componentName" $args) $i -}}
{{- $host := printf "%s.%s.%s.svc" $pod (include "baton.headlessName" $args) $.Release.Namespace -}}
{{- $addresses = append $addresses (printf "tcp://%s:%d" $host $port) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* Port name -> number, as YAML. The http port comes from the same config that the process reads. */}}
{{- define "baton.ports" -}}
{{- $config := (index .root.Values .role).config -}}
{{- $ports := dict -}}
{{- if eq .role "router" -}}
{{- $ports = dict "http" $config.listen.port "control" $config.listen.control_port -}}
{{- else -}}
{{- $node := $config.node -}}
{{- $ports = dict "http" $node.port "events" $node.events_port "replay" $node.replay_port "transfer" $node.transfer_port -}}
{{- end -}}
{{- if ne (len $ports) (len (values $ports | uniq)) -}}
{{- fail (printf "%s.config: ports must differ from each other, got %s" .role (toJson $ports)) -}}
{{- end -}}
{{- toYaml $ports -}}
{{- end -}}
