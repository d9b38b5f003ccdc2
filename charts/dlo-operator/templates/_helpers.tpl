{{/* The prefix of all names: the release, and the chart where the release does not say it. */}}
{{- define "dlo.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What a Deployment or DaemonSet selects its pods by; never changes. Takes (list $ component). */}}
{{- define "dlo.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ default $root.Chart.Name $root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{/* The labels of an object. Takes (list $ component). */}}
{{- define "dlo.labels" -}}
{{- $root := index . 0 -}}
{{ include "dlo.selectorLabels" . }}
app.kubernetes.io/part-of: dlo-operator
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{/* An image with registry and tag or digest. Takes (list $ component). */}}
{{- define "dlo.image" -}}
{{- $shared := (index . 0).Values.image -}}
{{- $own := (index (index . 0).Values (index . 1)).image -}}
{{- with $shared.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{- $own.repository -}}
{{- if $own.digest -}}@{{ $own.digest }}{{- else -}}:{{ coalesce $own.tag $shared.tag (index . 0).Chart.AppVersion }}{{- end -}}
{{- end -}}

{{/* The pull secrets of a pod; empty where there are none. */}}
{{- define "dlo.pullSecrets" -}}
{{- with .Values.image.pullSecrets -}}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* Name of a component's service account. Takes (list $ component). */}}
{{- define "dlo.serviceAccountName" -}}
{{- $account := (index (index . 0).Values (index . 1)).serviceAccount -}}
{{- if $account.create -}}
{{- default (printf "%s-%s" (include "dlo.fullname" (index . 0)) (index . 1)) $account.name -}}
{{- else -}}
{{- default "default" $account.name -}}
{{- end -}}
{{- end -}}

{{- define "dlo.agentNamespace" -}}
{{- default .Release.Namespace .Values.agent.namespace -}}
{{- end -}}

{{/* The security contexts of a pod, and of a container that needs nothing. */}}
{{- define "dlo.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "dlo.securityContext" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
privileged: false
readOnlyRootFilesystem: true
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Whole mebibytes of a size like 20Gi, rounded up. */}}
{{- define "dlo.mebibytes" -}}
{{- $units := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "M" 1000000 "G" 1000000000 "T" 1000000000000 -}}
{{- $bytes := mul (regexFind "^[0-9]+" . | int64) (index $units (regexFind "[A-Za-z]*$" .)) -}}
{{- div (add $bytes 1048575) 1048576 -}}
{{- end -}}

{{/* "true" where an object of the Prometheus operator is to be made. Takes (list $ switch). */}}
{{- define "dlo.monitored" -}}
{{- $mode := toString (index (index . 0).Values.monitoring (index . 1)).mode -}}
{{- if or (eq $mode "Required") (and (eq $mode "IfAvailable") ((index . 0).Capabilities.APIVersions.Has "monitoring.coreos.com/v1")) -}}
true
{{- end -}}
{{- end -}}

{{/* What operator and agents both reach: names and the API server. */}}
{{- define "dlo.egress" -}}
- ports:
    - port: 53
      protocol: UDP
    - port: 53
      protocol: TCP
{{- with .Values.networkPolicy.apiServer }}
- ports:
    {{- range .ports }}
    - port: {{ . }}
      protocol: TCP
    {{- end }}
  {{- with .cidrs }}
  to:
    {{- range . }}
    - ipBlock:
        cidr: {{ . }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end -}}
