{{/* The headless Service that gives the pods of a role their names. Not-ready pods are published: a router
     becomes ready only after a node reached it. */}}
{{- define "baton.headlessService" -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "baton.headlessName" . }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    {{- include "baton.selectorLabels" . | nindent 4 }}
  ports:
    {{- range $name, $port := include "baton.ports" . | fromYaml }}
    - name: {{ $name }}
      port: {{ int $port }}
      targetPort: {{ $name }}
      protocol: TCP
    {{- end }}
{{- end -}}
