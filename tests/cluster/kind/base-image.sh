#!/bin/bash
# usage: base-image.sh NAME ROOTFS.tar — the base of all images where no registry is: Debian by debootstrap (30 s).
set -euo pipefail
unset CONTAINERS_CONF
if ! [ -f "$2" ]; then
  folder=$(mktemp -d)
  trap 'rm -rf "$folder"' EXIT
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-venv bookworm "$folder" >"$2.log"
  rm -rf "$folder"/var/cache/apt/archives/*.deb "$folder"/var/lib/apt/lists/*
  tar -C "$folder" --numeric-owner -cf "$2.partial" .
  mv "$2.partial" "$2"
fi
container=$(buildah from scratch)
buildah add -q "$container" "$2" / >/dev/null
buildah commit -q --rm "$container" "$1" >/dev/null
