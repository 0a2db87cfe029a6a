{{/* One StatefulSet per role. Not a Deployment: nodes reach every router replica by its stable name, a node
     keeps its name (and its cache volume) over a restart, and a rollout never needs a spare accelerator.
     Parallel, because a router is not ready before a node registered with it, and nodes need all routers. */}}
{{- define "baton.workload" -}}
{{- $values := index .root.Values .role -}}
{{- $labels := include "baton.selectorLabels" . -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {{ include "baton.componentName" . }}
  labels:
    {{- include "baton.labels" . | nindent 4 }}
spec:
  serviceName: {{ include "baton.headlessName" . }}
  replicas: {{ int $values.replicas }}
  podManagementPolicy: Parallel
  selector:
    matchLabels:
      {{- $labels | nindent 6 }}
  template:
    metadata:
      labels:
        {{- $labels | nindent 8 }}
      annotations:
        checksum/config: {{ include "baton.config" . | sha256sum }}
        {{- with $values.podAnnotations }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    spec:
      serviceAccountName: {{ include "baton.serviceAccountName" .root }}
      automountServiceAccountToken: false
      # Off: the variables that Kubernetes injects for a Service called "baton" (BATON_PORT=tcp://...) would be
      # read as options.
      enableServiceLinks: false
      terminationGracePeriodSeconds: {{ include "baton.gracePeriod" . }}
      securityContext:
        runAsNonRoot: true
        runAsUser: {{ int64 .root.Values.runAsUser }}
        runAsGroup: {{ int64 .root.Values.runAsGroup }}
        fsGroup: {{ int64 .root.Values.fsGroup }}
        seccompProfile:
          type: RuntimeDefault
      {{- with .root.Values.imagePullSecrets }}
      imagePullSecrets:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.nodeSelector }}
      nodeSelector:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.tolerations }}
      tolerations:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      {{- with $values.affinity }}
      affinity:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      containers:
        - name: {{ .role }}
          image: {{ include "baton.image" . | quote }}
          imagePullPolicy: {{ include "baton.pullPolicy" . }}
          command: [baton]
          args:
            - {{ .role }}
            - --config
            - /etc/baton/{{ .role }}.yaml
            {{- if ne .role "router" }}
            # Listened on and announced: peers on other machines reach the pod at this address.
            - --host
            - $(POD_IP)
            - --node-id
            - $(POD_NAME)
            {{- end }}
          env:
            {{- include "baton.environment" . | nindent 12 }}
          ports:
            {{- range $name, $port := include "baton.ports" . | fromYaml }}
            - name: {{ $name }}
              containerPort: {{ int $port }}
              protocol: TCP
            {{- end }}
          startupProbe:
            {{- include "baton.probe" (list "/health" $values.probes.startup) | nindent 12 }}
          livenessProbe:
            {{- include "baton.probe" (list "/health" $values.probes.liveness) | nindent 12 }}
          readinessProbe:
            {{- include "baton.probe" (list "/ready" $values.probes.readiness) | nindent 12 }}
          securityContext:
            allowPrivilegeEscalation: false
            readOnlyRootFilesystem: true
            capabilities:
              drop: [ALL]
          {{- with $values.resources }}
          resources:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          volumeMounts:
            - name: config
              mountPath: /etc/baton
              readOnly: true
            - name: cache
              mountPath: /var/cache/baton
            - name: tmp
              mountPath: /tmp
      volumes:
        - name: config
          configMap:
            name: {{ include "baton.componentName" . }}
        - name: tmp
          emptyDir: {}
        {{- with include "baton.cacheVolume" . }}
        {{- . | nindent 8 }}
        {{- end }}
  {{- if eq $values.cache.type "claimTemplate" }}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: cache
        labels:
          {{- $labels | nindent 10 }}
      spec:
        accessModes: [ReadWriteOnce]
        {{- with $values.cache.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources:
          requests:
            storage: {{ $values.cache.size }}
  {{- end }}
{{- end -}}

{{- define "baton.environment" -}}
{{- $values := index .root.Values .role -}}
{{- if ne .role "router" -}}
- name: POD_IP
  valueFrom:
    fieldRef:
      fieldPath: status.podIP
- name: POD_NAME
  valueFrom:
    fieldRef:
      fieldPath: metadata.name
{{- /* "All cores" (threads: 0) would be the machine's cores: say the container's share instead. */}}
{{- $config := include "baton.config" . | fromYaml }}
{{- if not (dig "engine" "threads" 0 $config) }}
- name: BATON_THREADS
  valueFrom:
    resourceFieldRef:
      resource: limits.cpu
{{- end }}
{{ end -}}
- name: BATON_CACHE
  value: /var/cache/baton
# The root file system is read-only: whatever wants a home finds a writable one.
- name: HOME
  value: /tmp
{{- range $values.extraEnv }}
{{- if and (hasPrefix "BATON_" .name) (hasKey . "value") }}
{{- fail (printf "%s.extraEnv: %s would override the configuration file unseen; set it under %s.config" $.role .name $.role) }}
{{- end }}
- {{ toYaml . | nindent 2 | trim }}
{{- end }}
{{- end -}}

{{- define "baton.probe" -}}
httpGet:
  path: {{ index . 0 }}
  port: http
{{ toYaml (index . 1) }}
{{- end -}}

{{/* Time to drain what runs, and 10 s to close sockets and exit. */}}
{{- define "baton.gracePeriod" -}}
{{- $config := include "baton.config" . | fromYaml -}}
{{- $section := ternary "listen" "node" (eq .role "router") -}}
{{- $drain := dig $section "drain_timeout_s" 0 $config -}}
{{- add (ceil $drain | int) 10 -}}
{{- end -}}

{{- define "baton.cacheVolume" -}}
{{- $cache := (index .root.Values .role).cache -}}
{{- if eq $cache.type "emptyDir" -}}
- name: cache
  emptyDir:
    sizeLimit: {{ $cache.size }}
{{- else if eq $cache.type "existingClaim" -}}
{{- if not $cache.existingClaim -}}
{{- fail (printf "%s.cache.existingClaim is empty; name a PersistentVolumeClaim or choose another %s.cache.type" .role .role) -}}
{{- end -}}
- name: cache
  persistentVolumeClaim:
    claimName: {{ $cache.existingClaim }}
{{- end -}}
{{- end -}}
