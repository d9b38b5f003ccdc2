#!/bin/bash
# usage: node-image.sh IMAGE BASE CACHE — a kind node image from Debian packages, kind's own node files and built binaries.
# For machines without Docker and without a registry; 1.5 to 3 minutes. BASE is base-image.sh's, CACHE has bin/.
set -euo pipefail
image=$1 base=$2 cache=$3
here=$(cd "$(dirname "$0")" && pwd)
work=$cache/work bin=$cache/bin
version=$("$bin/kubeadm" version -o short)
kind=$(cd "$cache" && go mod download -json "sigs.k8s.io/kind@$("$bin/kind" version -q | sed 's/^v*/v/')" | jq -r .Dir)
unset CONTAINERS_CONF
network=(--isolation chroot --network host -v /etc/ssl/certs:/etc/ssl/certs:ro -v /etc/resolv.conf:/etc/resolv.conf:ro)
rm -rf "$work"
mkdir -p "$work"/{images,context/bin,context/manifests,slim}

# kind's own files and Debian packages.
cp -r "$kind/images/base/files" "$work/context/files"
chmod -R u+w "$work/context/files"
declare -A component
while read -r name; do
  short=${name##*/}
  component[${short%%:*}]=$name
done < <("$bin/kubeadm" config images list --kubernetes-version "$version")
# Without CAP_SYS_RESOURCE runc cannot lower oom_score_adj.
sed -i "s/restrict_oom_score_adj = false/restrict_oom_score_adj = true/; s#sandbox_image = .*#sandbox_image = \"${component[pause]}\"#" "$work/context/files/etc/containerd/config.toml"
sed -i 's#/usr/local/bin/containerd$#/usr/bin/containerd#' "$work/context/files/etc/systemd/system/containerd.service"
cat > "$work/context/Dockerfile.base" <<D
FROM $base
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends systemd dbus conntrack iptables nftables iproute2 ethtool util-linux mount kmod libseccomp2 pigz bash ca-certificates curl jq procps e2fsprogs socat busybox-static containerd runc containernetworking-plugins && rm -rf /var/lib/apt/lists/* /var/cache/apt/archives/*.deb
COPY files/usr/local/bin/ /usr/local/bin/
COPY files/kind/ /kind/
COPY files/etc/ /etc/
RUN chmod 755 /usr/local/bin/* /kind /kind/bin /kind/bin/*.sh \
 && find /lib/systemd/system/sysinit.target.wants/ -name systemd-tmpfiles-setup.service -delete \
 && rm -f /lib/systemd/system/multi-user.target.wants/* /etc/systemd/system/*.wants/* /lib/systemd/system/local-fs.target.wants/* /lib/systemd/system/sockets.target.wants/*udev* /lib/systemd/system/sockets.target.wants/*initctl* /lib/systemd/system/basic.target.wants/* /lib/systemd/system/containerd.service \
 && echo ReadKMsg=no >> /etc/systemd/journald.conf && ln -sf /lib/systemd/systemd /sbin/init \
 && systemctl enable kubelet.service containerd.service undo-mount-hacks.service && systemctl mask systemd-binfmt.service \
 && mkdir -p /etc/kubernetes/manifests /opt/cni && rm -rf /opt/cni/bin && ln -s /usr/lib/cni /opt/cni/bin \
 && ctr oci spec | jq '.hooks.createContainer[.hooks.createContainer|length] |= . + {"path":"/kind/bin/mount-product-files.sh"} | del(.process.rlimits)' > /etc/containerd/cri-base.json
D
buildah bud -q "${network[@]}" -t localhost/kindest-base:1 -f "$work/context/Dockerfile.base" "$work/context"

# A slim image (glibc, busybox, iptables) under the components.
slim=$work/slim
mkdir -p "$slim"/{bin,usr/sbin,usr/bin,usr/local/bin,usr/lib/x86_64-linux-gnu,etc,tmp,run,var,proc,sys,dev,root}
chmod 1777 "$slim/tmp"
from=$(buildah from localhost/kindest-base:1)
mounted=$(buildah mount "$from")
cp "$mounted/bin/busybox" "$slim/bin/"
for name in sh ip sleep cat mkdir mv cp rm ln sed awk grep cmp echo test ls date hostname nc nslookup printf env id timeout; do ln -s busybox "$slim/bin/$name"; done
cp -a "$mounted/usr/sbin/xtables-nft-multi" "$slim/usr/sbin/"
for name in iptables iptables-save iptables-restore ip6tables ip6tables-save ip6tables-restore; do ln -s xtables-nft-multi "$slim/usr/sbin/$name"; done
cp -a "$mounted/usr/lib/x86_64-linux-gnu/xtables" "$slim/usr/lib/x86_64-linux-gnu/"
for library in $(chroot "$mounted" sh -c "ldd /usr/sbin/xtables-nft-multi /usr/lib/x86_64-linux-gnu/xtables/*.so" | grep -oE '/[^ :]+'); do
  case $library in *.so*) mkdir -p "$slim/$(dirname "$library")"; cp -L "$mounted/$library" "$slim/$library" ;; esac
done
cp "$mounted/etc/protocols" "$mounted/etc/services" "$slim/etc/" 2>/dev/null || true
echo root:x:0:0:root:/root:/bin/sh > "$slim/etc/passwd"
echo root:x:0: > "$slim/etc/group"
buildah umount "$from" >/dev/null
buildah rm "$from" >/dev/null
container=$(buildah from scratch)
buildah copy -q "$container" "$slim" / >/dev/null
buildah config --env PATH=/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin "$container"
buildah commit -q --rm "$container" localhost/slim:1 >/dev/null

# make IMAGE FILE PLACE BASE [EXTRA FILE]: one component's image, as an archive.
make() {
  local container
  container=$(buildah from "$4")
  buildah copy -q --chmod 755 "$container" "$2" "$3" >/dev/null
  buildah config --entrypoint "[\"$3\"]" --cmd '' "$container"
  [ -z "${5:-}" ] || buildah copy -q --chmod 755 "$container" "$5" "/usr/local/bin/$(basename "$5")" >/dev/null
  buildah commit -q --rm "$container" "$1" >/dev/null
  buildah push -q "$1" "docker-archive:$work/images/$(basename "${1%%:*}").tar:$1"
}
for name in kube-apiserver kube-controller-manager kube-scheduler kube-proxy etcd; do
  make "${component[$name]}" "$bin/$name" "/usr/local/bin/$name" localhost/slim:1
done
make "${component[coredns]}" "$bin/coredns" /coredns localhost/slim:1
printf '#include <signal.h>\n#include <unistd.h>\nstatic void end(int s){_exit(0);}\nint main(){signal(SIGINT,end);signal(SIGTERM,end);for(;;)pause();}\n' > "$work/pause.c"
cc -static -Os -o "$work/pause" "$work/pause.c"
make "${component[pause]}" "$work/pause" /pause scratch
make localhost/simplecni:1 "$here/simplecni.sh" /usr/local/bin/simplecni.sh localhost/slim:1 "$bin/kubectl"

# Unpacked into a containerd root, so that a node starts with them.
preload=$work/preload
mkdir -p "$preload/state"
cat > "$preload/config.toml" <<C
version = 2
root = "$work/context/containerd-root"
state = "$preload/state"
disabled_plugins = ["io.containerd.grpc.v1.cri","io.containerd.internal.v1.opt"]
[grpc]
  address = "$preload/containerd.sock"
C
containerd -c "$preload/config.toml" > "$preload/log" 2>&1 &
daemon=$!
ctr() { command ctr -a "$preload/containerd.sock" -n k8s.io "$@"; }
for _ in $(seq 50); do ctr version >/dev/null 2>&1 && break; sleep 0.2; done
for archive in "$work"/images/*.tar; do ctr images import --snapshotter overlayfs "$archive" >/dev/null; done
for name in $(ctr images ls -q); do ctr images label "$name" io.cri-containerd.image=managed >/dev/null; done
kill $daemon
wait $daemon || true

cp "$bin"/{kubeadm,kubelet,kubectl,crictl} "$work/context/bin/"
cp "$here/default-cni.yaml" "$work/context/manifests/"
cat > "$work/context/Dockerfile.node" <<D
FROM localhost/kindest-base:1
COPY bin/ /usr/bin/
COPY manifests/ /kind/manifests/
RUN echo -n $version > /kind/version && ln -sf /usr/bin/containerd /usr/local/bin/containerd && rm -rf /var/lib/containerd /etc/cni/net.d/*
COPY containerd-root/ /var/lib/containerd/
ENV container=docker
STOPSIGNAL SIGRTMIN+3
ENTRYPOINT [ "/usr/local/bin/entrypoint", "/sbin/init" ]
D
buildah bud -q --format docker --isolation chroot --network host --layers=false -t "$image" -f "$work/context/Dockerfile.node" "$work/context"
rm -rf "$work"
