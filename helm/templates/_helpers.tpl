{{/* Names, labels and images. Every template takes (dict "root" $ "role" "router"|"prefill"|"decode"). */}}

{{/* 40 characters leave room for "-prefill-12" within a DNS label of 63 and for a revision hash. */}}
{{- define "baton.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.componentName" -}}
{{- printf "%s-%s" (include "baton.fullname" .root) .role -}}
{{- end -}}

{{- define "baton.headlessName" -}}
{{- printf "%s-headless" (include "baton.componentName" .) -}}
{{- end -}}

{{- define "baton.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "baton.labels" -}}
{{ include "baton.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "baton.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "baton.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "baton.image" -}}
{{- $own := (index .root.Values .role).image -}}
{{- $shared := .root.Values.image -}}
{{- $tag := default .root.Chart.AppVersion (default $shared.tag $own.tag) -}}
{{- printf "%s:%s" (default $shared.repository $own.repository) $tag -}}
{{- end -}}

{{- define "baton.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy (index .root.Values .role).image.pullPolicy -}}
{{- end -}}
