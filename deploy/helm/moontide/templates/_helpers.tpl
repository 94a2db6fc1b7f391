{{- define "moontide.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Prefix of all names; short enough for what controllers append. */}}
{{- define "moontide.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 30 | trimSuffix "-" -}}
{{- else if contains (include "moontide.name" .) .Release.Name -}}
{{- .Release.Name | trunc 30 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "moontide.name" .) | trunc 30 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "moontide.releaseLabels" -}}
app.kubernetes.io/name: {{ include "moontide.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{/* (dict "root" . "component" NAME) */}}
{{- define "moontide.selector" -}}
{{ include "moontide.releaseLabels" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "moontide.labels" -}}
{{ include "moontide.selector" . }}
app.kubernetes.io/part-of: moontide
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{- define "moontide.podLabels" -}}
{{ include "moontide.selector" . }}
app.kubernetes.io/part-of: moontide
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A changed config starts the pods of that role anew, and no others. */}}
{{- define "moontide.podAnnotations" -}}
{{- $files := (include (print .root.Template.BasePath "/configmap.yaml") .root | fromYaml).data -}}
{{- $config := get $files (printf "%s.yaml" .component) -}}
{{- if and (eq .root.Values.kvstore.mode "sidecar") (ne .component "conductor") -}}
{{- $config = print $config (get $files "kvstore.yaml") -}}
{{- end -}}
checksum/config: {{ sha256sum $config }}
{{- with .root.Values.podAnnotations }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "moontide.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}

{{/* Whether compute pods are on the host's network: "true" or "". */}}
{{- define "moontide.hostNetwork" -}}
{{- if or .Values.hostNetwork (eq .Values.kvstore.mode "daemonset") -}}true{{- end -}}
{{- end -}}

{{- define "moontide.bundledValkey" -}}
{{- if not (or .Values.registry.url .Values.registry.existingSecret) -}}true{{- end -}}
{{- end -}}

{{- define "moontide.masterHost" -}}
{{ include "moontide.fullname" . }}-master.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "moontide.valkeyHost" -}}
{{ include "moontide.fullname" . }}-valkey.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* Directory of the model as the services see it. */}}
{{- define "moontide.modelDir" -}}
{{- if eq .Values.model.source "builtin" -}}/var/cache/moontide/builtin-model{{- else -}}{{ .Values.model.path }}{{- end -}}
{{- end -}}

{{/* (dict "settings" MAP "owned" LIST "where" TEXT): fails when a user sets what the chart decides. */}}
{{- define "moontide.checkSettings" -}}
{{- $where := .where -}}
{{- $settings := .settings -}}
{{- range .owned -}}
{{- if hasKey $settings . -}}
{{- fail (printf "%s.%s is decided by the chart; set the value of the chart that stands for it (values.yaml)" $where .) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* (dict "root" . "clientCerts" BOOL): section `tls` of a service. */}}
{{- define "moontide.tlsSection" -}}
{{- if .root.Values.tls.enabled -}}
tls:
  cert_file: /etc/moontide-tls/tls.crt
  key_file: /etc/moontide-tls/tls.key
  ca_file: /etc/moontide-tls/ca.crt
  require_client_cert: {{ .clientCerts }}
  server_name: {{ .root.Values.tls.serverName }}
{{- else -}}
tls: {}
{{- end -}}
{{- end -}}

{{- define "moontide.tlsSecret" -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "moontide.fullname" .)) }}
{{- end -}}

{{/* Certificates of a service. A whole directory: files mounted with subPath stay the old ones when the secret changes. */}}
{{- define "moontide.certificateMounts" -}}
{{- if .Values.tls.enabled }}
- {name: tls, mountPath: /etc/moontide-tls, readOnly: true}
{{- end }}
{{- if .Values.registry.caSecret }}
- {name: registry-ca, mountPath: /etc/moontide-registry, readOnly: true}
{{- end }}
{{- end -}}

{{- define "moontide.certificateVolumes" -}}
{{- if .Values.tls.enabled }}
- name: tls
  secret:
    secretName: {{ include "moontide.tlsSecret" . }}
    defaultMode: 0440
{{- end }}
{{- with .Values.registry.caSecret }}
- name: registry-ca
  secret:
    secretName: {{ . }}
    defaultMode: 0440
    items: [{key: ca.crt, path: ca.crt}]
{{- end }}
{{- end -}}

{{/* (dict "seconds" N): a pod that only one of is there must not wait five minutes for a host that is gone. */}}
{{- define "moontide.nodeLoss" -}}
{{- range list "not-ready" "unreachable" }}
- {key: node.kubernetes.io/{{ . }}, operator: Exists, effect: NoExecute, tolerationSeconds: {{ $.seconds }}}
{{- end }}
{{- end -}}

{{/* (dict "root" . "role" VALUES "component" NAME) */}}
{{- define "moontide.placement" -}}
{{- with .role.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .role.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if or .role.tolerations .role.nodeLossSeconds }}
tolerations:
{{- with .role.tolerations }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .role.nodeLossSeconds }}
  {{- include "moontide.nodeLoss" (dict "seconds" .) | nindent 2 }}
{{- end }}
{{- end }}
{{- with .role.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $spread := .role.topologySpread | default dict }}
{{- if $spread.enabled }}
topologySpreadConstraints:
{{- range $spread.topologyKeys }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "moontide.selector" $ | nindent 8 }}
    # Pods of one revision: those that an upgrade takes away do not count.
    matchLabelKeys: [{{ ternary "pod-template-hash" "controller-revision-hash" (eq $.component "conductor") }}]
{{- end }}
{{- end }}
{{- end -}}

{{- define "moontide.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "moontide.podSecurity" -}}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ int .Values.runAsUser }}
  runAsGroup: {{ int .Values.runAsGroup }}
  fsGroup: {{ int .Values.runAsGroup }}
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- end -}}

{{- define "moontide.security" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end -}}

{{/* Of the store process: RDMA needs to lock the memory of the segment. */}}
{{- define "moontide.storeSecurity" -}}
{{- if .Values.rdma.enabled -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
{{- if .Values.rdma.rootForMemlock }}
  runAsNonRoot: false
  runAsUser: 0
{{- end }}
  capabilities:
    drop: [ALL]
    add: [IPC_LOCK]
{{- else -}}
{{ include "moontide.security" . }}
{{- end -}}
{{- end -}}

{{/*
(dict "root" . "threads" N): who and where this pod is, where compilers keep what they make (USER: the user has no entry of its own in the
image), and what the engine needs (deploy/plan.py: service_env).
*/}}
{{- define "moontide.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOST_ID
{{- if eq .root.Values.kvstore.mode "daemonset" }}
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
{{- else }}
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- end }}
- name: MOONTIDE_CACHE
  value: /var/cache/moontide
- name: HOME
  value: /tmp
- name: USER
  value: moontide
- name: TORCHINDUCTOR_CACHE_DIR
  value: /var/cache/moontide/torchinductor
- name: TRITON_CACHE_DIR
  value: /var/cache/moontide/triton
- name: OMP_NUM_THREADS
  value: {{ .threads | quote }}
- name: MKL_NUM_THREADS
  value: {{ .threads | quote }}
- name: PYTHONUNBUFFERED
  value: "1"
- name: HF_HUB_OFFLINE
  value: "1"
- name: GLOG_minloglevel
  value: "1"
{{- if not .root.Values.rdma.enabled }}
- name: MC_FORCE_TCP
  value: "1"
{{- end }}
- name: MC_TCP_SLICE_SIZE
  value: "16777216"
- name: MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER
  value: "65535"
- name: MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER
  value: "65535"
- name: MC_TCP_ADMISSION_TIMEOUT_MS
  value: "30000"
- name: MC_TCP_LANES_PER_PEER
  value: "16"
{{- if .root.Values.registry.existingSecret }}
- name: REGISTRY_URL
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.registry.existingSecret }}
      key: {{ .root.Values.registry.key }}
{{- else if .root.Values.registry.url }}
- name: REGISTRY_URL
  value: {{ .root.Values.registry.url | quote }}
{{- else if .root.Values.valkey.existingSecret }}
- name: VALKEY_PASSWORD
  valueFrom:
    secretKeyRef:
      name: {{ .root.Values.valkey.existingSecret }}
      key: password
- name: REGISTRY_URL
  value: redis://:$(VALKEY_PASSWORD)@{{ include "moontide.valkeyHost" .root }}:{{ .root.Values.valkey.port }}/0
{{- else }}
- name: REGISTRY_URL
  value: redis://{{ include "moontide.valkeyHost" .root }}:{{ .root.Values.valkey.port }}/0
{{- end }}
{{- range $name, $value := .root.Values.env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* (dict "port" NAME "startupSeconds" N "scheme" HTTPS or nothing) */}}
{{- define "moontide.probes" -}}
{{- $scheme := ternary (printf ", scheme: %s" .scheme) "" (not (empty .scheme)) -}}
startupProbe:
  httpGet: {path: /live, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ div (add .startupSeconds 4) 5 }}
livenessProbe:
  httpGet: {path: /live, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /ready, port: {{ .port }}{{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end -}}

{{- define "moontide.mounts" -}}
volumeMounts:
  - {name: config, mountPath: /etc/moontide, readOnly: true}
  - {name: tmp, mountPath: /tmp}
  - {name: cache, mountPath: /var/cache/moontide}
  {{- include "moontide.certificateMounts" . | nindent 2 }}
{{- if ne .Values.model.source "builtin" }}
  - {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- end -}}

{{- define "moontide.volumes" -}}
- name: config
  configMap:
    name: {{ include "moontide.fullname" . }}-config
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
- name: cache
  emptyDir: {sizeLimit: {{ .Values.cache.sizeLimit }}}
{{- include "moontide.certificateVolumes" . }}
{{- if eq .Values.model.source "pvc" }}
- name: model
  persistentVolumeClaim:
    claimName: {{ .Values.model.pvc.existingClaim | default (printf "%s-model" (include "moontide.fullname" .)) }}
    readOnly: true
{{- else if eq .Values.model.source "hostPath" }}
- name: model
  hostPath: {path: {{ .Values.model.hostPath }}, type: Directory}
{{- else if eq .Values.model.source "image" }}
- name: model
  image:
    reference: {{ required "model.image.reference names the OCI image that holds the model" .Values.model.image.reference }}
    pullPolicy: {{ .Values.model.image.pullPolicy }}
{{- end }}
{{- end -}}

{{/* (dict "root" . "addresses" LIST): does not end before all of them take connections. */}}
{{- define "moontide.waitContainer" -}}
- name: wait
  image: {{ include "moontide.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: [python, /etc/moontide/wait.py]
  args:
{{- range .addresses }}
    - {{ . | quote }}
{{- end }}
  env:
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
  resources:
    requests: {cpu: 50m, memory: 64Mi}
    limits: {cpu: 200m, memory: 128Mi}
  {{- include "moontide.security" .root | nindent 2 }}
  volumeMounts:
    - {name: config, mountPath: /etc/moontide, readOnly: true}
{{- end -}}

{{/* What every service waits for, beside the stores: the master, and Valkey where it is ours. */}}
{{- define "moontide.infrastructure" -}}
{{- $addresses := list (printf "%s:%v" (include "moontide.masterHost" .) .Values.mooncakeMaster.ports.rpc) -}}
{{- if include "moontide.bundledValkey" . -}}
{{- $addresses = append $addresses (printf "%s:%v" (include "moontide.valkeyHost" .) .Values.valkey.port) -}}
{{- end -}}
{{- toJson $addresses -}}
{{- end -}}

{{/* (dict "root" . "isSidecar" BOOL): the store process. */}}
{{- define "moontide.storeContainer" -}}
{{- $store := .root.Values.kvstore -}}
- name: kvstore
  image: {{ include "moontide.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- if .isSidecar }}
  restartPolicy: Always
{{- end }}
  command: [python, -m, kvstore]
  args:
    - --config=/etc/moontide/kvstore.yaml
    - --set=node.node_id=store-$(HOST_ID)
    - --set=node.host=$(POD_IP)
    - --set=node.host_id=$(HOST_ID)
    - --set=registry.url=$(REGISTRY_URL)
  env:
    {{- include "moontide.env" (dict "root" .root "threads" 1) | nindent 4 }}
{{- if $store.hugepages }}
    - name: MC_STORE_USE_HUGEPAGE
      value: "1"
    - name: MC_STORE_HUGEPAGE_SIZE
      value: {{ ternary "2MB" "1GB" (eq $store.hugepages "2Mi") }}
{{- end }}
  ports:
    - {name: store-http, containerPort: {{ $store.ports.http }}}
    - {name: store-grpc, containerPort: {{ $store.ports.grpc }}}
    - {name: store-client, containerPort: {{ $store.ports.client }}}
  {{- include "moontide.probes" (dict "port" "store-http" "startupSeconds" $store.startupSeconds) | nindent 2 }}
  {{- $memory := int $store.overheadGiB }}
  {{- if not $store.hugepages }}{{- $memory = add $memory $store.poolGiB }}{{- end }}
  resources:
    requests:
      cpu: {{ $store.cpu.request | quote }}
      memory: {{ $memory }}Gi
{{- if $store.hugepages }}
      hugepages-{{ $store.hugepages }}: {{ $store.poolGiB }}Gi
{{- end }}
{{- if .root.Values.rdma.enabled }}
      {{ .root.Values.rdma.resourceName }}: {{ .root.Values.rdma.count }}
{{- end }}
    limits:
      cpu: {{ $store.cpu.limit | quote }}
      memory: {{ $memory }}Gi
{{- if $store.hugepages }}
      hugepages-{{ $store.hugepages }}: {{ $store.poolGiB }}Gi
{{- end }}
{{- if .root.Values.rdma.enabled }}
      {{ .root.Values.rdma.resourceName }}: {{ .root.Values.rdma.count }}
{{- end }}
  {{- include "moontide.storeSecurity" .root | nindent 2 }}
  volumeMounts:
    - {name: config, mountPath: /etc/moontide, readOnly: true}
    - {name: tmp, mountPath: /tmp}
    - {name: cache, mountPath: /var/cache/moontide}
    {{- include "moontide.certificateMounts" .root | nindent 4 }}
{{- if and (not .isSidecar) $store.ssd.hostPath }}
    - {name: ssd, mountPath: /ssd}
{{- end }}
{{- end -}}

{{/* Init containers of a compute pod: a store process of its own, or the wait for the host's. */}}
{{- define "moontide.storeInit" -}}
{{- if eq .Values.kvstore.mode "sidecar" -}}
{{ include "moontide.waitContainer" (dict "root" . "addresses" (include "moontide.infrastructure" . | fromJsonArray)) }}
{{ include "moontide.storeContainer" (dict "root" . "isSidecar" true) }}
{{- else -}}
{{ include "moontide.waitContainer" (dict "root" . "addresses" (append (include "moontide.infrastructure" . | fromJsonArray) (printf "$(POD_IP):%v" .Values.kvstore.ports.grpc))) }}
{{- end -}}
{{- end -}}

{{/*
One stage of a prefill group.
(dict "root" . "idx" place in its pod "group" id "leader" host of stage 0 "stage" number, or "" where the pod's place in a LeaderWorkerSet says)
*/}}
{{- define "moontide.stageContainer" -}}
{{- $prefill := .root.Values.prefill -}}
{{- $http := add $prefill.ports.http .idx -}}
{{- $grpc := add $prefill.ports.grpc .idx -}}
{{- $link := add $prefill.ports.link .idx -}}
{{- $fromIndex := eq (toString .stage) "" -}}
- name: stage-{{ .idx }}
  image: {{ include "moontide.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- if and $fromIndex (gt (int $prefill.stagesPerPod) 1) }}
  command:
    - sh
    - -c
    - exec python -m prefill_node "$@" --set=prefill.stage_idx=$((LWS_WORKER_INDEX * {{ $prefill.stagesPerPod }} + {{ .idx }}))
    - stage
{{- else }}
  command: [python, -m, prefill_node]
{{- end }}
  args:
    - --config=/etc/moontide/prefill.yaml
    - --set=node.node_id=$(POD_NAME)-{{ .idx }}
    - --set=node.host=$(POD_IP)
    - --set=node.host_id=$(HOST_ID)
    - --set=node.http_port={{ $http }}
    - --set=node.grpc_port={{ $grpc }}
    - --set=registry.url=$(REGISTRY_URL)
    - --set=store.client_address=$(POD_IP):{{ .root.Values.kvstore.ports.client }}
    - --set=store.service_address={{ .leader }}:{{ .root.Values.kvstore.ports.grpc }}
    - --set=prefill.group_id={{ .group }}
    - --set=prefill.link_port={{ $link }}
    - --set=prefill.control_address={{ .leader }}:{{ $prefill.ports.control }}
{{- if not $fromIndex }}
    - --set=prefill.stage_idx={{ .stage }}
{{- else if eq (int $prefill.stagesPerPod) 1 }}
    - --set=prefill.stage_idx=$(LWS_WORKER_INDEX)
{{- end }}
  env:
{{- if eq $prefill.launcher "LeaderWorkerSet" }}
    - name: GROUP_INDEX
      valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"}}
{{- end }}
    {{- include "moontide.env" (dict "root" .root "threads" .root.Values.model.settings.threads) | nindent 4 }}
  ports:
    - {name: http-{{ .idx }}, containerPort: {{ $http }}}
    - {name: grpc-{{ .idx }}, containerPort: {{ $grpc }}}
    - {name: link-{{ .idx }}, containerPort: {{ $link }}}
{{- if eq (toString .stage) "0" }}
    - {name: control, containerPort: {{ $prefill.ports.control }}}
{{- end }}
  {{- include "moontide.probes" (dict "port" (printf "http-%v" .idx) "startupSeconds" $prefill.startupSeconds) | nindent 2 }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ $prefill.preStopSeconds }}}
  resources:
    {{- toYaml $prefill.resources | nindent 4 }}
  {{- include "moontide.security" .root | nindent 2 }}
  {{- include "moontide.mounts" .root | nindent 2 }}
    - {name: shm, mountPath: /dev/shm}
{{- end -}}

{{/* (dict "root" . "role" VALUES): the network of a compute pod, and what else all of them share. */}}
{{- define "moontide.computePod" -}}
serviceAccountName: {{ include "moontide.fullname" .root }}-{{ .component }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "moontide.pullSecrets" .root }}
{{- if include "moontide.hostNetwork" .root }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with .role.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{ include "moontide.podSecurity" .root }}
{{- include "moontide.placement" . }}
{{- end -}}

{{/* (dict "root" . "size" TEXT) */}}
{{- define "moontide.computeVolumes" -}}
{{ include "moontide.volumes" .root }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .size }}}
{{- end -}}

{{/* Seconds from a pod's end to SIGKILL: the drain is bounded inside the process, the rest is room to close. */}}
{{- define "moontide.prefillGrace" -}}
{{ add .Values.prefill.preStopSeconds 10 20 (include "moontide.sidecarDrain" .) }}
{{- end -}}

{{/* Of the store process of a compute pod, which is told to stop when the other containers have ended. */}}
{{- define "moontide.sidecarDrain" -}}
{{ ternary .Values.kvstore.drainSeconds 0 (eq .Values.kvstore.mode "sidecar") }}
{{- end -}}
