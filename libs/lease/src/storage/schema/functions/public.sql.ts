import { Schema } from '../../schema';

const MAX_BYTES = 1024 * 1024;

/** For triggers, psql and other languages. Not versioned: its parameters only ever get more, with defaults. */
export const publicEnqueueSql = (s: string): string => {
  const { channel } = Schema.ofQuoted(s);
  const check = (wrong: string, field: string, must: string): string =>
    `IF ${wrong} THEN RAISE EXCEPTION 'enqueue: ${field} must be ${must}' USING ERRCODE = '22023', COLUMN = '${field}'; END IF;`;
  const name = (field: string, bytes = 200): string =>
    check(`coalesce(octet_length(${field}) NOT BETWEEN 1 AND ${bytes}, true)`, field, `text of 1 to ${bytes} bytes`);
  return `
CREATE FUNCTION ${s}.enqueue(kind text, payload json DEFAULT 'null', queue text DEFAULT 'default', priority int DEFAULT 0,
  run_at timestamptz DEFAULT NULL, delay interval DEFAULT NULL, key text DEFAULT NULL, key_mode text DEFAULT 'ignore',
  key_scope text DEFAULT 'kind', key_period interval DEFAULT NULL, max_attempts int DEFAULT 20, max_crashes int DEFAULT 3,
  max_releases int DEFAULT 20, max_snoozes int DEFAULT 1000, deadline interval DEFAULT '5 minutes', tags text[] DEFAULT '{}',
  concurrency_key text DEFAULT NULL, concurrency_per_key int DEFAULT 1,
  key_max_wait interval DEFAULT NULL)
RETURNS bigint LANGUAGE plpgsql AS $fn$
#variable_conflict use_variable
DECLARE
  v_item json;
  v_id bigint;
BEGIN
  ${name('kind')}
  ${name('queue')}
  ${check(`coalesce(octet_length(payload::text) > ${MAX_BYTES}, true)`, 'payload', `JSON of at most ${MAX_BYTES} bytes`)}
  ${check(`payload::text ~ '(^|[^\\\\])(\\\\\\\\)*\\\\u0000'`, 'payload', 'free of NUL characters')}
  ${check('coalesce(priority NOT BETWEEN -32768 AND 32767, true)', 'priority', 'a whole number from -32768 to 32767')}
  ${check('run_at IS NOT NULL AND delay IS NOT NULL', 'delay', 'absent when run_at is given')}
  ${check(`run_at NOT BETWEEN '1970-01-01 00:00:00+00' AND '9999-12-31 00:00:00+00'`, 'run_at', 'in the years 1970 to 9999')}
  ${check(`delay < interval '0' OR delay > interval '3652 days'`, 'delay', 'from 0 to ten years')}
  ${check(`deadline < interval '1 ms' OR deadline > interval '3652 days'`, 'deadline', 'null (none) or from 1 ms to ten years')}
  ${check('coalesce(concurrency_per_key NOT BETWEEN 1 AND 1000000, true)', 'concurrency_per_key', 'from 1 to 1000000')}
  ${['max_attempts', 'max_crashes'].map((f) => check(`coalesce(${f} < 1, true)`, f, 'at least 1')).join('\n  ')}
  ${['max_releases', 'max_snoozes'].map((f) => check(`coalesce(${f} < 0, true)`, f, 'at least 0')).join('\n  ')}
  ${check('coalesce(cardinality(tags), 0) > 20 OR array_ndims(tags) > 1 OR EXISTS (SELECT FROM unnest(tags) AS t(tag) WHERE coalesce(octet_length(t.tag) NOT BETWEEN 1 AND 100, true))', 'tags', 'at most 20 texts of 1 to 100 bytes')}
  IF concurrency_key IS NOT NULL THEN ${name('concurrency_key')} END IF;
  v_item := json_strip_nulls(json_build_object('queue', queue, 'kind', kind, 'priority', priority, 'maxAttempts', max_attempts,
    'maxCrashes', max_crashes, 'maxReleases', max_releases, 'maxSnoozes', max_snoozes, 'deadlineFrom', 'module',
    'deadlineMs', round(date_part('epoch', deadline) * 1000)::bigint, 'delayMs', round(date_part('epoch', delay) * 1000)::bigint,
    'runAt', run_at, 'tags', CASE WHEN cardinality(tags) > 0 THEN tags END, 'concurrencyKey', concurrency_key,
    'concurrencyMax', concurrency_per_key));
  v_item := (left(v_item::text, -1) || ',"payloads":[' || payload::text || ']}')::json;
  IF key IS NULL THEN
    ${check(`key_mode IS DISTINCT FROM 'ignore'`, 'key_mode', 'left out without a key')}
    ${check('key_period IS NOT NULL', 'key_period', 'left out without a key')}
    ${check('key_max_wait IS NOT NULL', 'key_max_wait', 'left out without a key')}
    v_id := ${s}.enqueue_v1(json_build_array(v_item))::bigint;
  ELSE
    ${name('key', 500)}
    ${check(`coalesce(key_mode NOT IN ('ignore', 'replace', 'serial', 'throttle', 'debounce'), true)`, 'key_mode', 'ignore, replace, serial, throttle or debounce')}
    ${check(`coalesce(key_scope NOT IN ('kind', 'queue'), true)`, 'key_scope', 'kind or queue')}
    ${check(`(key_mode IN ('throttle', 'debounce')) <> (key_period IS NOT NULL)`, 'key_period', 'given with throttle and debounce, and only with them')}
    ${check(`key_period NOT BETWEEN interval '1 ms' AND interval '3652 days'`, 'key_period', 'from 1 ms to ten years')}
    ${check(`key_mode = 'debounce' AND (run_at IS NOT NULL OR delay IS NOT NULL)`, 'key_mode', 'another than debounce when run_at or delay is given')}
    ${check(`key_max_wait IS NOT NULL AND key_mode <> 'debounce'`, 'key_max_wait', 'left out, or the mode debounce')}
    ${check(`key_max_wait NOT BETWEEN interval '1 ms' AND interval '3652 days'`, 'key_max_wait', 'from 1 ms to ten years')}
    v_item := (left(v_item::text, -1) || ',' || substr(json_strip_nulls(json_build_object('keySpace', key_scope || ':' ||
      CASE key_scope WHEN 'kind' THEN kind ELSE queue END, 'key', key, 'keyMode', key_mode,
      'keyPeriodMs', round(date_part('epoch', key_period) * 1000)::bigint,
      'keyMaxWaitMs', round(date_part('epoch', key_max_wait) * 1000)::bigint,
      'delayMs', CASE WHEN key_mode = 'debounce' THEN round(date_part('epoch', key_period) * 1000)::bigint END))::text, 2))::json;
    v_id := (${s}.enqueue_keyed_v1(json_build_array(v_item))->0->>'id')::bigint;
  END IF;
  PERFORM pg_notify('${channel}', json_build_array(json_build_array(queue, kind))::text);
  RETURN v_id;
END $fn$`;
};
