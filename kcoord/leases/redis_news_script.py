"""The Lua script of `kcoord.leases.redis_news`: keeps facts, and publishes them at a distance."""

from __future__ import annotations

import hashlib

# KEYS[1]  the namespace's hash, and the name of its channel: a ring of the latest facts, by their number modulo its size;
#          `last` and `sent`, the numbers of the latest and of the latest published; `due`, the moment at which a message may next
#          be published (µs, server clock); `receivers` of the last one
# ARGV     facts, or '' to publish those that are pending; the size of the ring
#          → the milliseconds until they are due; 0: nothing is left to do
# A message is the receivers of the one before, a space, and facts: 32 KiB, or one call's. What is left is due later.
RING = 512
SCRIPT = """
local key, facts, ring = KEYS[1], ARGV[1], tonumber(ARGV[2])
local has = redis.pcall('HMGET', key, 'last', 'sent', 'due', 'receivers')
-- a server that is out of memory refuses a script's HSET, unless the script has written before
if has.err then redis.call('DEL', key) else redis.call('PEXPIRE', key, 600000) end
local last, sent = math.floor(tonumber(has[1]) or 0), math.floor(tonumber(has[2]) or 0)
if not (sent >= 0 and last >= sent and last - sent <= ring and last < 9e15) then last, sent = 0, 0 end
if facts ~= '' then
  last = last + 1
  redis.call('HSET', key, string.format('%.0f', last % ring), facts)
end
if last == sent then return 0 end
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local due, receivers = tonumber(has[3]) or 0, tonumber(has[4]) or 0
-- else the clock was set back, or the ring is about to be full
local early = due > now and due - now <= 1000000 and last - sent < ring / 2
if early and facts == '' then return 0 end  -- they are of others since, who were told
if not early then
  local names, message, size = {}, {string.format('%d ', receivers)}, 0
  for number = sent + 1, last do names[#names + 1] = string.format('%.0f', number % ring) end
  -- the server keeps a copy of a message for each receiver that has not read it
  for _, each in ipairs(redis.call('HMGET', key, unpack(names))) do
    each = each or ''
    if size > 0 and size + #each > 32768 then break end
    size, sent, message[#message + 1] = size + #each, sent + 1, each
  end
  receivers = redis.call('PUBLISH', key, table.concat(message))
  due = now + math.min(receivers * (60 + size / 160), 250000)
end
redis.call('HSET', key, 'last', string.format('%.0f', last), 'sent', string.format('%.0f', sent),
           'due', string.format('%.0f', due), 'receivers', receivers)
redis.call('PEXPIRE', key, 600000)
return (early or sent < last) and math.ceil((due - now) / 1000) + 1 or 0
"""
SHA = hashlib.sha1(SCRIPT.encode()).hexdigest()
