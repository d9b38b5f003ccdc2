{{/* After the release's objects are gone; weights order accounts, rights and the Job. Takes a weight. */}}
{{- define "dlo.cleanup.hook" -}}
helm.sh/hook: post-delete
helm.sh/hook-weight: {{ . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end -}}
