#!/bin/sh
# Writes the secrets of k8s/base, once: a random Redis password, for its ACL file as a hash, and a random signing key.
# Nothing can be applied before this: there is no default password.
#   k8s/make-secrets.sh [DIRECTORY]      default: base/secrets beside this script
set -eu
umask 077
directory=${1:-$(dirname "$0")/base/secrets}
mkdir -p "$directory"
for name in redis-url users.acl signing-key; do
  if [ -e "$directory/$name" ]; then
    echo "$directory/$name is there already; remove it to make a new one (its users must restart then)" >&2
    exit 1
  fi
done

random() { od -An -tx1 -N32 /dev/urandom | tr -d ' \n'; }

password=$(random)
hash=$(printf %s "$password" | sha256sum | cut -d' ' -f1)
if [ ${#password} -ne 64 ] || [ ${#hash} -ne 64 ]; then
  echo "od, tr, sha256sum and cut are needed: nothing is written" >&2
  exit 1
fi
printf 'redis://kcoord:%s@redis-kcoord:6379/0' "$password" > "$directory/redis-url"
# A file of keys: to rotate, add a line. The first signs, all verify.
printf '%s %s\n' "key-$(date +%Y%m%d)-$(random | cut -c1-8)" "$(random)" > "$directory/signing-key"

# The agent's user may run kcoord's script (and its commands), and subscribe, on its own keys, and ask a Redis
# Cluster which node has them. Nothing else: no KEYS, FLUSHALL or CONFIG, no other keys. The probe's user may send PING.
cat > "$directory/users.acl" <<ACL
user default off resetpass resetkeys resetchannels -@all
user probe on nopass resetkeys resetchannels -@all +ping
user kcoord on #$hash resetkeys ~kcoord:* resetchannels &kcoord:* -@all +eval +evalsha +get +set +del +pexpire +pttl +rpush +lrange +ltrim +llen +hset +hgetall +expire +publish +subscribe +unsubscribe +cluster|slots +command
ACL
echo "wrote $directory/redis-url, users.acl and signing-key: keep them out of version control" >&2
