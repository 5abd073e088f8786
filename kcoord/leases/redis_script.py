"""The Lua script of `kcoord.leases.redis`: one operation on one key's lease, and its arguments."""

from __future__ import annotations

import hashlib

# KEYS[1]  the key's hash: state L|R|F
#            numbers  'FENCE ENDS TTL LIMIT': ENDS and LIMIT in µs of the server's clock, TTL in ms
#            token    of a lease
#            text     a lease's holder, the manifest of R, the log of F
#            where    of F
# ARGV     op, token, and then
#   acquire  holder, ttl_ms, limit_ms, void manifest or ''  → {'W', fence} | {'R', manifest} | {'F', log, where}
#                                                             | {'L', holder, ms left}
#   look                                                    → the same; {'W', '0'} if the key is free
#   renew    ttl_ms, holder, ms left of the hard limit      → 1 | 0
#   ready    manifest, ttl_ms                               → 1
#   fail     log, where, ttl_ms                             → 1 | 0
#   release                                                 → 1 | 0
# `ready` and `look` need no token: pass ''. Nothing is published: `redis_news`. One read finds the whole
# record: a question costs that and the time. A record that has ended is none, whether or not the server has removed it. `renew`
# takes the lease again if there is no record (FLUSHALL, an empty restart): its holder is alive, and nobody else has it. The hard
# limit ends a record, too: the holder says how much of its limit is left. A value that is no record of ours is deleted, and the
# error KCOORD-NOT-OURS says what it was: then the key is free, and the caller asks again.
NOT_OURS = "KCOORD-NOT-OURS"
VERSION = "2"
"""Part of every key's name. Raise it if a record changes: versions that run side by side never meet each other's."""
SCRIPT = """
local key, op, token = KEYS[1], ARGV[1], ARGV[2]
local has = redis.pcall('HMGET', key, 'state', 'numbers', 'token', 'text', 'where')
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local state, owner, text, not_ours = has[1], has[3], has[4], has.err
local fence, ends, ttl, limit = 0, 0, 0, 0
if state then
  local a, b, c, d = string.match(has[2] or '', '^(%d+) (%d+) (%d+) (%d+)$')
  fence, ends, ttl, limit = tonumber(a), tonumber(b), tonumber(c), tonumber(d)
  if not a or math.max(fence, ends, ttl, limit) >= 9e15 then  -- a double holds less, and its successor
    not_ours = 'a hash without a number that it needs'
  -- a manifest comes back as the void of the next claim: so nothing that changes when it is decoded
  elseif not (state == 'L' and owner and text or state == 'F' and text and has[5]
              or state == 'R' and text and #text <= 256 and string.find(text, '^[%w._-]+$')) then
    not_ours = 'a hash in no state that there is'
  end
end
if not_ours then
  redis.call('DEL', key)
  return redis.error_reply('KCOORD-NOT-OURS ' .. not_ours)
end
if state and ends <= now then state = false end

local function numbers(ms)
  ends = now + ms * 1000
  return string.format('%.0f %.0f %.0f %.0f', fence, ends, ttl, limit)
end

-- a server that is out of memory refuses a script's HSET, unless the script has written before
local function until_ms(ms)
  redis.call('PEXPIRE', key, ms)
  redis.call('HSET', key, 'numbers', numbers(ms))
end

local asks = op == 'acquire' or op == 'look'
if asks and state then
  -- a server's clock that was set back would keep a record for as much longer
  if ends - now > ttl * 1000 then until_ms(ttl) end
  if state == 'R' then
    if text ~= ARGV[6] then return {'R', text} end
  elseif state == 'F' then
    return {'F', text, has[5]}
  elseif owner ~= token then
    return {'L', text, math.ceil((ends - now) / 1000)}
  end
end
if op == 'look' then return {'W', '0'} end

-- no DEL: while a cluster migrates the slot, a key that is gone can be made at the other node only
local function write(letter, its_ttl, ms, without, ...)
  ttl = its_ttl
  local is_there = redis.call('PEXPIRE', key, ms) == 1
  redis.call('HSET', key, 'state', letter, 'numbers', numbers(ms), ...)
  if is_there then redis.call('HDEL', key, unpack(without)) else redis.call('PEXPIRE', key, ms) end
end

local function lease(holder, ttl_ms, limit_ms)
  fence, limit = math.max(fence + 1, now), now + limit_ms * 1000
  write('L', ttl_ms, math.min(ttl_ms, limit_ms), {'where'}, 'token', token, 'text', holder)
end

if asks then
  if state ~= 'L' then lease(ARGV[3], tonumber(ARGV[4]), tonumber(ARGV[5])) end
  return {'W', string.format('%.0f', fence)}
end

if op == 'ready' then
  limit = 0
  write('R', tonumber(ARGV[4]), ARGV[4], {'token', 'where'}, 'text', ARGV[3])
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
  local left_ms = math.min((limit - now) / 1000, tonumber(ARGV[5]))
  if left_ms <= 0 then return 0 end
  until_ms(math.floor(math.min(tonumber(ARGV[3]), left_ms)) + 1)
elseif op == 'fail' then
  write('F', tonumber(ARGV[5]), ARGV[5], {'token'}, 'text', ARGV[3], 'where', ARGV[4])
elseif op == 'release' then
  redis.call('DEL', key)
else
  return redis.error_reply('kcoord: unknown operation ' .. op)
end
return 1
"""
SHA = hashlib.sha1(SCRIPT.encode()).hexdigest()
