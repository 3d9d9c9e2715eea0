-- Counts rate limits in Redis or Valkey. One run is one operation over all scopes of a request, all or nothing.
--
-- KEYS     the clock; then for each scope its book, its leases, and the log of each of its windows
-- ARGV[1]  a msgpack map; `operation` is one of reserve, more, close, look; the fields are those of lua_script.ScriptArguments
--
-- A scope's book is a hash: what is held and wanted per pace (1: second, 2: minute), what is used of each window, and a
-- record per reservation. Its leases are a sorted set of reservations by expiry. A window's log is a sorted set of
-- "time:amount" by time. Times are whole microseconds, which doubles and the format %.0f represent exactly.

local ask = cmsgpack.unpack(ARGV[1])
local call = redis.call

local function text(number)
  return string.format('%.0f', number)
end

local function time_of(entry)
  return tonumber(string.match(entry, '^(%d+):'))
end

local function amount_of(entry)
  return tonumber(string.match(entry, ':(%d+)$'))
end

-- The time of Redis, which all gateways share. It never goes back, even if the clock does.
local function read_clock()
  local raw = ask.raw
  if not raw then
    local time = call('TIME')
    raw = tonumber(time[1]) * 1000000 + tonumber(time[2])
  end
  local known = call('HMGET', KEYS[1], 'raw', 'now')
  local now = raw
  if known[1] then
    now = tonumber(known[2]) + math.max(0, raw - tonumber(known[1]))
  end
  call('HSET', KEYS[1], 'raw', text(raw), 'now', text(now))
  call('PEXPIRE', KEYS[1], ask.keep)
  return now
end

local now = read_clock()

-- Records: start time, tokens delivered, and tokens granted and wanted per pace

local function read_record(line)
  if not line then
    return nil
  end
  local numbers = {}
  for number in string.gmatch(line, '%d+') do
    numbers[#numbers + 1] = tonumber(number)
  end
  return {
    since = numbers[1], out = numbers[2], granted = {numbers[3], numbers[4]}, wanted = {numbers[5], numbers[6]},
  }
end

local function write_record(record)
  local granted, wanted = record.granted, record.wanted
  return table.concat({
    text(record.since), text(record.out), text(granted[1]), text(granted[2]), text(wanted[1]), text(wanted[2]),
  }, ' ')
end

local function count_record(scope, record, sign)
  for pace = 1, 2 do
    scope.held[pace] = scope.held[pace] + sign * math.max(0, record.granted[pace] - record.out)
    scope.wanted[pace] = scope.wanted[pace] + sign * record.wanted[pace]
  end
end

-- Windows

-- A book without the sum is new, or Redis has evicted the book but not the log.
local function recount(window)
  local used = 0
  for _, entry in ipairs(call('ZRANGE', window.log, 0, -1)) do
    used = used + amount_of(entry)
  end
  return used
end

local function forget(window)
  if window.used == 0 then
    return
  end
  local past = text(now - window.span)
  local old = call('ZRANGEBYSCORE', window.log, '-inf', past)
  if #old > 0 then
    for _, entry in ipairs(old) do
      window.used = window.used - amount_of(entry)
    end
    call('ZREMRANGEBYSCORE', window.log, '-inf', past)
  end
  window.entries = call('ZCARD', window.log)
  if window.entries == 0 then -- also if Redis has evicted the log
    window.used = 0
  end
end

-- Merges entries within one grain of time, which at least halves their number. The latest time is kept.
local function merge(window)
  local grain = math.max(1, math.floor(window.span / math.floor(ask.entries / 2)))
  local merged = {}
  for _, entry in ipairs(call('ZRANGE', window.log, 0, -1)) do
    local time, amount = time_of(entry), amount_of(entry)
    local last = merged[#merged]
    if last and math.floor(last.time / grain) == math.floor(time / grain) then
      last.time, last.amount = time, last.amount + amount
    else
      merged[#merged + 1] = {time = time, amount = amount}
    end
  end
  call('DEL', window.log)
  local added = {}
  for place, entry in ipairs(merged) do
    added[#added + 1] = text(entry.time)
    added[#added + 1] = text(entry.time) .. ':' .. text(entry.amount)
    if #added >= 1000 or place == #merged then
      call('ZADD', window.log, unpack(added))
      added = {}
    end
  end
  window.entries = #merged
end

local function use(window, time, amount)
  if amount <= 0 or time <= now - window.span then
    return
  end
  window.used = window.used + amount
  local at = text(time)
  local same = call('ZRANGEBYSCORE', window.log, at, at)[1]
  if same then
    amount = amount + amount_of(same)
    call('ZREM', window.log, same)
  else
    window.entries = window.entries + 1
  end
  call('ZADD', window.log, at, at .. ':' .. text(amount))
  if window.entries > ask.entries then
    merge(window)
  end
  call('PEXPIRE', window.log, ask.keep)
end

-- Removes an amount that was counted at `since` or later and not used after all, oldest entries first.
local function give_back(window, since, amount)
  if amount <= 0 or since <= now - window.span then
    return
  end
  for _, entry in ipairs(call('ZRANGEBYSCORE', window.log, text(since), '+inf')) do
    local had = amount_of(entry)
    local part = math.min(had, amount)
    local at = text(time_of(entry))
    call('ZREM', window.log, entry)
    if had > part then
      call('ZADD', window.log, at, at .. ':' .. text(had - part))
    end
    window.used = window.used - part
    amount = amount - part
    if amount <= 0 then
      break
    end
  end
end

-- Microseconds until `short` more is free, and 1 if that does not depend on other requests.
local function wait_for(window, short)
  local place, page = 0, 64
  while true do
    local entries = call('ZRANGE', window.log, place, place + page - 1)
    for _, entry in ipairs(entries) do
      short = short - amount_of(entry)
      if short <= 0 then
        return time_of(entry) + window.span - now, 1
      end
    end
    if #entries < page then
      return ask.ahead + window.span, 0
    end
    place = place + page
  end
end

-- Scopes

local function lapse(scope)
  for _, id in ipairs(call('ZRANGEBYSCORE', scope.leases, '-inf', text(now), 'LIMIT', 0, 1000)) do
    local record = read_record(call('HGET', scope.book, 'r:' .. id))
    if record then
      count_record(scope, record, -1)
      call('HDEL', scope.book, 'r:' .. id)
    end
    call('ZREM', scope.leases, id)
    if id == ask.id then
      scope.record = nil
    end
  end
  scope.open = call('ZCARD', scope.leases)
  if scope.open == 0 and (scope.held[1] > 0 or scope.held[2] > 0) then -- Redis has evicted the leases
    call('DEL', scope.book)
    scope.held, scope.wanted, scope.record = {0, 0}, {0, 0}, nil
  end
end

local function load_scopes()
  local scopes, place = {}, 2
  for index, asked in ipairs(ask.scopes) do
    local scope = {concurrent = asked.concurrent, book = KEYS[place], leases = KEYS[place + 1], windows = {}}
    place = place + 2
    local fields = {'held1', 'held2', 'wanted1', 'wanted2', 'r:' .. ask.id}
    for number, window in ipairs(asked.windows) do
      local field = 'used:' .. window[1] .. ':' .. window[2]
      scope.windows[number] = {
        log = KEYS[place], field = field, meter = window[1], pace = window[2], limit = window[3], span = window[4],
        entries = 0,
      }
      fields[#fields + 1] = field
      place = place + 1
    end
    local values = call('HMGET', scope.book, unpack(fields))
    scope.held = {tonumber(values[1] or 0), tonumber(values[2] or 0)}
    scope.wanted = {tonumber(values[3] or 0), tonumber(values[4] or 0)}
    scope.record = read_record(values[5])
    lapse(scope)
    for number, window in ipairs(scope.windows) do
      window.used = tonumber(values[5 + number] or nil) or recount(window)
      forget(window)
    end
    scopes[index] = scope
  end
  return scopes
end

local function save(scopes)
  for _, scope in ipairs(scopes) do
    local fields = {
      'held1', text(scope.held[1]), 'held2', text(scope.held[2]),
      'wanted1', text(scope.wanted[1]), 'wanted2', text(scope.wanted[2]),
    }
    for _, window in ipairs(scope.windows) do
      fields[#fields + 1] = window.field
      fields[#fields + 1] = text(window.used)
    end
    call('HSET', scope.book, unpack(fields))
    call('PEXPIRE', scope.book, ask.keep)
    call('PEXPIRE', scope.leases, ask.keep)
  end
end

local function keep_record(scope, record)
  scope.record = record
  count_record(scope, record, 1)
  call('HSET', scope.book, 'r:' .. ask.id, write_record(record))
  call('ZADD', scope.leases, text(now + ask.lease), ask.id)
end

local function is_output(window)
  return window.meter == 'output_tokens'
end

-- The limit with the longest wait: indexes of scope and window; window 0 means concurrent requests
local short = {wait = 0, exact = 1, scope = 0, window = 0}

local function fall_short(scope, window, wait, exact)
  short.exact = math.min(short.exact, exact)
  if short.scope == 0 or wait > short.wait then
    short.wait, short.scope, short.window = wait, scope, window
  end
end

-- Counts deliveries since `from`: {age, amount}, oldest first. Skips what was counted already.
local function count_out(scope, record)
  local skip = math.max(0, record.out - ask.from)
  for _, segment in ipairs(ask.segments) do
    local amount = segment[2]
    local passed = math.min(skip, amount)
    skip, amount = skip - passed, amount - passed
    if amount > 0 then
      for _, window in ipairs(scope.windows) do
        if is_output(window) then
          use(window, now - segment[1], amount)
        end
      end
      record.out = record.out + amount
    end
  end
end

local function standings(scopes, answer)
  for _, scope in ipairs(scopes) do
    for _, window in ipairs(scope.windows) do
      local taken, reset = 0, 0
      if is_output(window) then
        taken = scope.held[window.pace] + scope.wanted[window.pace]
      end
      if taken > 0 then
        reset = window.span
      elseif window.used > 0 then
        reset = time_of(call('ZREVRANGE', window.log, 0, 0)[1]) + window.span - now
      end
      answer[#answer + 1] = window.limit - window.used - taken
      answer[#answer + 1] = reset
    end
  end
  return answer
end

local operations = {}

function operations.look()
  return {1, now}
end

function operations.reserve()
  local scopes = load_scopes()
  local known, place = false, 0
  for number, scope in ipairs(scopes) do
    known = known or scope.record ~= nil -- a repeated call
    if scope.concurrent >= 0 and scope.open >= scope.concurrent then
      fall_short(number, 0, math.max(1000, math.floor(ask.ahead / scope.concurrent)), 0)
    end
    for window_number, window in ipairs(scope.windows) do
      place = place + 1
      window.amount = ask.amounts[place]
      local room = window.limit - window.used
      if is_output(window) then
        room = room - scope.held[window.pace] - scope.wanted[window.pace]
      end
      if window.amount > 0 and window.amount > room then
        fall_short(number, window_number, wait_for(window, window.amount - room))
      end
    end
  end
  if short.scope > 0 and not known then
    save(scopes)
    return standings(scopes, {0, now, short.wait, short.exact, short.scope, short.window})
  end
  for _, scope in ipairs(scopes) do
    if not scope.record then
      keep_record(scope, {since = now, out = 0, granted = {ask.targets[1], ask.targets[2]}, wanted = {0, 0}})
      for _, window in ipairs(scope.windows) do
        if not is_output(window) then
          use(window, now, window.amount)
        end
      end
    end
  end
  save(scopes)
  return standings(scopes, {1, now})
end

-- Counts deliveries, grants `need` tokens in total or up to `targets`, and renews the lease. A pace without a limit has
-- target 0.
function operations.more()
  local scopes = load_scopes()
  local granted = nil
  for _, scope in ipairs(scopes) do
    if scope.record then
      granted = granted or scope.record.granted
    end
  end
  if not granted and ask.again == 0 then
    return {-1, now}
  end
  granted = granted or {ask.from, ask.from}
  local total = {granted[1], granted[2]}
  for _, scope in ipairs(scopes) do
    if scope.record then
      count_record(scope, scope.record, -1)
    else
      scope.record = {since = now, out = ask.from, granted = {granted[1], granted[2]}, wanted = {0, 0}}
    end
    count_out(scope, scope.record)
    scope.record.wanted = {0, 0}
  end
  local needs, adds = {0, 0}, {0, 0}
  for pace = 1, 2 do
    if ask.targets[pace] > 0 then
      needs[pace] = math.max(0, ask.need - granted[pace])
      adds[pace] = math.max(needs[pace], ask.targets[pace] - granted[pace])
    end
  end
  for number, scope in ipairs(scopes) do
    for window_number, window in ipairs(scope.windows) do
      local pace = window.pace
      if is_output(window) and needs[pace] > 0 then
        local own = math.max(0, scope.record.granted[pace] - scope.record.out)
        local room = window.limit - window.used - scope.held[pace] - own
        adds[pace] = math.min(adds[pace], room)
        if room < needs[pace] then
          local wait, exact = wait_for(window, needs[pace] - room)
          if scope.held[pace] > 0 then -- other requests may give it back sooner
            exact = 0
          end
          fall_short(number, window_number, wait, exact)
        end
      end
    end
  end
  for pace = 1, 2 do
    if needs[pace] > 0 and short.scope == 0 then
      total[pace] = granted[pace] + adds[pace]
    end
  end
  for _, scope in ipairs(scopes) do
    local record = scope.record
    record.granted = total
    if short.scope > 0 then
      record.wanted = {needs[1], needs[2]}
    end
    keep_record(scope, record)
  end
  save(scopes)
  if short.scope > 0 then
    return {0, now, total[1], total[2], short.wait, short.exact, short.scope, short.window}
  end
  return {1, now, total[1], total[2]}
end

-- Counts what was used and gives back the rest. Returns 0 if the reservation is closed or expired.
function operations.close()
  local scopes = load_scopes()
  local found = 0
  for _, scope in ipairs(scopes) do
    local record = scope.record
    if record then
      found = 1
      count_record(scope, record, -1)
      count_out(scope, record)
      for _, window in ipairs(scope.windows) do
        if is_output(window) then
          use(window, now, ask.extra)
          give_back(window, record.since, -ask.extra)
        elseif window.meter == 'input_tokens' then
          use(window, now, ask.input)
          give_back(window, record.since, -ask.input)
        elseif ask.void == 1 then
          give_back(window, record.since, 1)
        end
      end
      call('HDEL', scope.book, 'r:' .. ask.id)
      call('ZREM', scope.leases, ask.id)
    end
  end
  save(scopes)
  return {found, now}
end

return operations[ask.operation]()
