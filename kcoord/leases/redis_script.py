"""The Lua script of `kcoord.leases.redis`: one operation on one key's lease, and its arguments."""

from __future__ import annotations

import hashlib

# KEYS[1]  the key's hash: state L|R|F, token, holder, fence, limit (µs, server clock), ttl (ms), manifest, log, where
# ARGV     op, token, and then
#   acquire  holder, ttl_ms, limit_ms, void manifest or ''  → {'W', fence} | {'R', manifest} | {'F', log, where}
#                                                             | {'L', holder, ms left}
#   look                                                    → the same; {'W', '0'} if the key is free
#   renew    ttl_ms, holder, ms left of the hard limit      → 1 | 0
#   ready    manifest, ttl_ms                               → 1
#   fail     log, where, ttl_ms                             → 1 | 0
#   release                                                 → 1 | 0
# `ready` and `look` need no token: pass ''. Every change is published on the channel named like the key. An expired lease is a
# hash that is gone. `renew` takes the lease again if the hash is gone (FLUSHALL, an empty restart): its holder is alive, and
# nobody else has it. The hard limit removes a hash, too: so the holder says how much of its limit is left. A value that is no
# hash of ours is deleted, and the error KCOORD-NOT-OURS says what it was: then the key is free, and the caller asks again.
NOT_OURS = "KCOORD-NOT-OURS"
SCRIPT = """
local key, op, token = KEYS[1], ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local function not_ours()
  local kind = redis.call('TYPE', key).ok
  if kind == 'none' then return nil end
  if kind ~= 'hash' then return 'a ' .. kind end
  local names = {'state', 'token', 'holder', 'fence', 'limit', 'ttl', 'manifest', 'log', 'where'}
  local values, has = redis.call('HMGET', key, unpack(names)), {}
  for n, name in ipairs(names) do has[name] = values[n] end
  local function number(name)
    local text = has[name]
    return text and #text <= 16 and string.find(text, '^%d+$') and tonumber(text) < 9e15  -- a double holds it and its successor
  end
  if redis.call('PTTL', key) < 0 then return 'a hash that never expires' end
  if not (number('fence') and number('ttl')) then return 'a hash without a number that it needs' end
  if has.state == 'L' then
    if has.token and has.holder and number('limit') then return nil end
  elseif has.state == 'R' then
    -- it comes back as the void of the next claim: so nothing that changes when it is decoded
    if has.manifest and string.find(has.manifest, '^[%w._-]+$') and #has.manifest <= 256 then return nil end
  elseif has.state == 'F' then
    if has.log and has.where then return nil end
  end
  return 'a hash in no state that there is'
end
local found = not_ours()
if found then
  redis.call('DEL', key)
  return redis.error_reply('KCOORD-NOT-OURS ' .. found)
end

local held = redis.call('HMGET', key, 'state', 'token', 'fence', 'limit', 'ttl')
local state, owner = held[1], held[2]

local function lease(holder, ttl_ms, limit_ms)
  local fence = math.max((tonumber(held[3]) or 0) + 1, now)
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'L', 'token', token, 'holder', holder,
             'fence', string.format('%.0f', fence), 'limit', string.format('%.0f', now + limit_ms * 1000), 'ttl', ttl_ms)
  redis.call('PEXPIRE', key, math.min(ttl_ms, limit_ms))
  return string.format('%.0f', fence)
end

if op == 'acquire' or op == 'look' then
  local holder, ttl_ms, limit_ms, void = ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6]
  local of = redis.call('HMGET', key, 'manifest', 'log', 'where', 'holder')  -- before it may end, in mid-script
  -- a server's clock that was set back would keep a hash for as much longer
  if redis.call('PTTL', key) > (tonumber(held[5]) or math.huge) then redis.call('PEXPIRE', key, held[5]) end
  if state == 'R' then
    if of[1] and of[1] ~= void then return {'R', of[1]} end
  elseif state == 'F' then
    if of[2] and of[3] then return {'F', of[2], of[3]} end
  elseif state == 'L' and owner == token then
    return {'W', held[3]}
  elseif state == 'L' then
    local left_ms = redis.call('PTTL', key)
    -- 0: on a replica, where nothing expires, this is one that ended
    if left_ms > 0 and of[4] then return {'L', of[4], left_ms} end
  end
  if op == 'look' then return {'W', '0'} end
  return {'W', lease(holder, ttl_ms, limit_ms)}
end

if op == 'ready' then
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'R', 'manifest', ARGV[3], 'fence', held[3] or '0', 'ttl', ARGV[4])
  redis.call('PEXPIRE', key, tonumber(ARGV[4]))
  redis.call('PUBLISH', key, 'ready')
  return 1
end

if op == 'renew' and not state then
  if tonumber(ARGV[5]) <= 0 then return 0 end
  lease(ARGV[4], tonumber(ARGV[3]), tonumber(ARGV[5]))
  return 1
end

if state ~= 'L' or owner ~= token then return 0 end

if op == 'renew' then
  -- the holder's own clock never goes back: whichever limit comes first holds
  local left_ms = math.min((tonumber(held[4]) - now) / 1000, tonumber(ARGV[5]))
  if left_ms <= 0 then return 0 end
  redis.call('PEXPIRE', key, math.floor(math.min(tonumber(ARGV[3]), left_ms)) + 1)
elseif op == 'fail' then
  redis.call('DEL', key)
  redis.call('HSET', key, 'state', 'F', 'log', ARGV[3], 'where', ARGV[4], 'fence', held[3], 'ttl', ARGV[5])
  redis.call('PEXPIRE', key, tonumber(ARGV[5]))
  redis.call('PUBLISH', key, 'failed')
elseif op == 'release' then
  redis.call('DEL', key)
  redis.call('PUBLISH', key, 'free')
else
  return redis.error_reply('kcoord: unknown operation ' .. op)
end
return 1
"""
SHA = hashlib.sha1(SCRIPT.encode()).hexdigest()
