#!/bin/sh
# more_hosts.sh HOST...: client hosts beside A, B and C, made as the rig makes these. Run on the server's host of a rig in one guest.
n=20
for c in "$@"; do
  n=$((n + 1))
  [ -e "/run/rig/$c.pid" ] && continue
  setsid unshare --net --uts --ipc --mount --pid --fork sh /rig/client-init "$c" </dev/null >/dev/null 2>&1 &
  until [ -s "/run/rig/$c.pid" ]; do sleep 0.1; done
  ip link add "v$c" type veth peer name eth0 netns "$(cat "/run/rig/$c.pid")"
  ip link set "v$c" master br0 up
  until on "$c" "grep -q /boot_id /proc/mounts"; do sleep 0.1; done  # client-init's last mount
  on "$c" "sh /rig/client-up $c 10.9.0.$n" </dev/null >/dev/null 2>&1 || exit
done
