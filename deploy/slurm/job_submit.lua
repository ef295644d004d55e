-- Fleetcast's advice on run times for jobs that are submitted: JobSubmitPlugins=lua, beside slurm.conf.
--
-- slurmctld runs this under its locks. So it reads two small local files and never calls out. Whatever is wrong with
-- them, the job goes in as it would without us. A limit that the user gave is never touched.

local FOLDER = "/var/cache/fleetcast/durations" -- that of the adapter slurm_durations
local LIMIT_TIMES = nil -- 2: a job without a limit gets twice its p90. nil: it only gets a comment
local VALID_S = 86400 -- files that say to be valid for longer are none
local MOST_BYTES, LONGEST = 65536, 4096 -- of a file, and of a line: whatever is in them, reading ends soon

local function bucket(key)
  local number = 0
  for at = 1, #key do
    number = (number * 31 + key:byte(at)) % 65521
  end
  return string.format("%02x", number % 256)
end

local function content(name)
  local file = io.open(FOLDER .. "/" .. name, "r")
  if file == nil then
    return ""
  end
  local text = file:read(MOST_BYTES)
  file:close()
  return text or ""
end

-- p50 and p90 in minutes, nothing where nothing is known
local function advice(key)
  local left_s = (tonumber(content("until"):match("^%d+")) or 0) - os.time()
  if left_s <= 0 or left_s > VALID_S then
    return nil
  end
  local lines = content(bucket(key)):match("^(.*)\n") or "" -- whole lines: a name that is cut can be another name
  for line in lines:gmatch("[^\n]+") do
    if #line <= LONGEST and line:sub(-#key) == key then
      local p50, p90, name = line:match("^(%d+) (%d+) %d+ (.+)$")
      if name == key then
        return tonumber(p50), tonumber(p90)
      end
    end
  end
end

-- the longest limit of the partition, in minutes; nothing where several are asked for
local function longest(job, parts)
  for name, part in pairs(parts) do
    if name == job.partition or (job.partition == nil and part.flag_default == 1) then
      return part.max_time
    end
  end
end

local function advise(job, parts)
  local p50, p90 = advice((job.user_name or "") .. " " .. (job.name or ""))
  if p50 == nil then
    return
  end
  local said = string.format("[fleetcast] runs for %d min (p90 %d min)", p50, p90)
  local most = longest(job, parts)
  if LIMIT_TIMES ~= nil and most ~= nil and job.time_limit == slurm.NO_VAL then
    job.time_limit = math.min(math.ceil(p90 * LIMIT_TIMES), most)
    said = string.format("%s, limit %d min", said, job.time_limit)
  end
  if job.admin_comment == nil or job.admin_comment == "" then
    job.admin_comment = said
  end
end

function slurm_job_submit(job, parts, uid)
  local ok, why = pcall(advise, job, parts)
  if not ok then
    pcall(slurm.log_info, "fleetcast: %s", tostring(why))
  end
  return slurm.SUCCESS
end

function slurm_job_modify(job, record, parts, uid)
  return slurm.SUCCESS
end
