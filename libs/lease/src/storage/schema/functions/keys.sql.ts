import { Schema } from '../../schema';
import { inLiteral } from '../quote';

/**
 * Where a job stands, in one look at all its tables, so that one that is moving is seen exactly once: a job state, or null if there is no
 * such job. Locks nothing.
 */
export const stateSql = (s: string): string => `
CREATE FUNCTION ${s}.state_v1(p_job bigint) RETURNS text LANGUAGE sql STABLE AS $fn$
  SELECT CASE WHEN EXISTS (SELECT FROM ${s}.leases WHERE job_id = p_job) THEN 'running'
    WHEN EXISTS (SELECT FROM ${s}.ready WHERE job_id = p_job) THEN 'ready'
    ELSE coalesce((SELECT w.reason FROM ${s}.waiting w WHERE w.job_id = p_job),
      (SELECT f.state FROM ${s}.jobs j JOIN ${s}.finished f ON f.job_id = j.id AND f.finished_at >= j.created_at - interval '1 day'
       WHERE j.id = p_job LIMIT 1)) END
$fn$`;

/**
 * Lets the keys of finished jobs go: a key whose next job waits passes to that one, which becomes ready (or scheduled); one whose window is
 * open stays; any other is deleted. Locks those rows of job_keys and the waiting row of the next. Waits for them no longer than an enqueue of its
 * own takes (lock_timeout): a settle must not stand behind somebody's open transaction. What is skipped counts for nothing, since
 * its job has finished, and `sweep_keys_v1` repairs it.
 */
export const releaseKeysSql = (s: string): string => `
CREATE FUNCTION ${s}.release_keys_v1(p_jobs bigint[]) RETURNS void LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
BEGIN
  BEGIN
    PERFORM FROM ${s}.job_keys k WHERE k.job_id = ANY (p_jobs) OR k.next_id = ANY (p_jobs) ORDER BY k.key_space, k.key FOR UPDATE;
  EXCEPTION WHEN lock_not_available THEN NULL;
  END;
  FOR v IN
    SELECT k.key_space, k.key, k.next_id, k.until, k.job_id = ANY (p_jobs) AS ended FROM ${s}.job_keys k
    WHERE k.job_id = ANY (p_jobs) OR k.next_id = ANY (p_jobs)
    ORDER BY k.key_space, k.key FOR UPDATE SKIP LOCKED
  LOOP
    IF NOT v.ended THEN
      UPDATE ${s}.job_keys k SET next_id = NULL WHERE k.key_space = v.key_space AND k.key = v.key;
    ELSIF v.next_id IS NOT NULL THEN
      UPDATE ${s}.job_keys k SET job_id = v.next_id, next_id = NULL WHERE k.key_space = v.key_space AND k.key = v.key;
      PERFORM ${s}.unblock_v1(v.next_id, 'key');
    ELSIF coalesce(v.until <= clock_timestamp(), true) THEN
      DELETE FROM ${s}.job_keys k WHERE k.key_space = v.key_space AND k.key = v.key;
    END IF;
  END LOOP;
END $fn$`;

/**
 * Makes a job that waits for its key, or for a place, ready; or scheduled, if its time has not come. To the head of its lane: it has waited
 * already. Announces its lane, at the commit. Locks its waiting row, unless somebody keeps it locked (lock_timeout): then the next pass finds it.
 */
export const unblockSql = (s: string): string => `
CREATE FUNCTION ${s}.unblock_v1(p_job bigint, p_on text) RETURNS boolean LANGUAGE plpgsql AS $fn$
DECLARE
  v_now timestamptz := clock_timestamp();
  v_lane text;
BEGIN
  BEGIN
    SELECT json_build_array(json_build_array(w.queue, w.kind)) INTO v_lane FROM ${s}.waiting w
    WHERE w.job_id = p_job AND w.blocked_on = p_on FOR UPDATE;
    IF NOT FOUND THEN RETURN false; END IF;
  EXCEPTION WHEN lock_not_available THEN RETURN false;
  END;
  UPDATE ${s}.waiting w SET reason = 'scheduled', blocked_on = NULL WHERE w.job_id = p_job AND w.run_at > v_now;
  IF FOUND THEN RETURN true; END IF;
  WITH d AS (DELETE FROM ${s}.waiting w WHERE w.job_id = p_job RETURNING w.*)
  INSERT INTO ${s}.ready (job_id, position, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue, kind,
    concurrency_key, batch_id)
  SELECT d.job_id, nextval('${inLiteral(s)}.positions') - 4611686018427387904, d.attempt, d.crashes, d.releases, d.snoozes, d.payload_bytes,
    d.priority, d.suspect, d.keyed, d.saved, d.queue, d.kind, d.concurrency_key, d.batch_id FROM d;
  PERFORM pg_notify('${Schema.ofQuoted(s).channel}', v_lane);
  RETURN true;
END $fn$`;

/** Keeps a job that has not started from starting until this transaction ends. False: it is in neither table any more; look again. */
export const holdSql = (s: string): string => `
CREATE FUNCTION ${s}.hold_v1(p_job bigint) RETURNS boolean LANGUAGE plpgsql AS $fn$
BEGIN
  PERFORM FROM ${s}.ready WHERE job_id = p_job FOR SHARE;
  IF FOUND THEN RETURN true; END IF;
  PERFORM FROM ${s}.waiting WHERE job_id = p_job FOR SHARE;
  RETURN FOUND;
END $fn$`;

/**
 * Gives a job that has never started another payload (and with it another concurrency key) and time. Locks its ready or waiting row, then writes its row of jobs. Returns
 * 'replaced', or 'started' if it has begun a run, or 'moved' if it is in neither table any more: look again.
 */
export const replaceSql = (s: string): string => `
CREATE FUNCTION ${s}.replace_v1(p_job bigint, p_payload json, p_run_at timestamptz, p_concurrency text) RETURNS text LANGUAGE plpgsql AS $fn$
DECLARE
  v_started boolean;
  v_ready boolean := true;
BEGIN
  SELECT attempt + crashes + releases + snoozes > 0 INTO v_started FROM ${s}.ready WHERE job_id = p_job FOR UPDATE;
  IF NOT FOUND THEN
    v_ready := false;
    SELECT attempt + crashes + releases + snoozes > 0 INTO v_started FROM ${s}.waiting WHERE job_id = p_job FOR UPDATE;
    IF NOT FOUND THEN RETURN 'moved'; END IF;
  END IF;
  IF v_started THEN RETURN 'started'; END IF;
  UPDATE ${s}.jobs SET payload = p_payload, payload_bytes = octet_length(p_payload::text), concurrency_key = nullif(p_concurrency, '')
  WHERE id = p_job;
  IF NOT v_ready THEN
    UPDATE ${s}.waiting SET payload_bytes = octet_length(p_payload::text), concurrency_key = p_concurrency,
      run_at = CASE WHEN reason = 'scheduled' THEN coalesce(p_run_at, clock_timestamp()) ELSE p_run_at END WHERE job_id = p_job;
    -- It may have waited for a place of the former payload's key.
    PERFORM ${s}.unblock_v1(p_job, 'limit');
  ELSIF p_run_at > clock_timestamp() THEN
    WITH d AS (DELETE FROM ${s}.ready WHERE job_id = p_job RETURNING *)
    INSERT INTO ${s}.waiting (job_id, run_at, payload_bytes, priority, suspect, keyed, saved, reason, queue, kind, concurrency_key)
    SELECT d.job_id, p_run_at, octet_length(p_payload::text), d.priority, d.suspect, d.keyed, d.saved, 'scheduled', d.queue, d.kind,
      p_concurrency FROM d;
  ELSE
    UPDATE ${s}.ready SET payload_bytes = octet_length(p_payload::text), concurrency_key = p_concurrency WHERE job_id = p_job;
  END IF;
  RETURN 'replaced';
END $fn$`;

/**
 * Enqueues jobs with a unique key, in the order of their keys; returns a JSON array of { id, outcome, state }, in the order given. Each
 * element of `p_jobs` is as for enqueue_v1, with one payload, plus { keySpace, key, keyMode, keyPeriodMs?, keyMaxWaitMs? }. What happens while
 * an unfinished job holds the key:
 *
 *   ignore    nothing is enqueued ('existing')
 *   replace   if it has not started, its payload and time are replaced ('replaced'), else nothing is enqueued ('existing')
 *   serial    if it runs, one job waits for it ('created' or, if one waits already, 'existing'); else 'existing', and that one cannot start
 *             before this transaction ends, so that it sees what the caller wrote
 *   throttle  nothing is enqueued for keyPeriodMs after a job was ('existing'), also when that one has finished
 *   debounce  if it has not started, its payload is replaced and its time put off to keyPeriodMs from now, at most keyMaxWaitMs after it was
 *             enqueued ('replaced'); else a new one takes the key ('created')
 *
 * Locks: a new row of job_keys, at which rivals wait until this transaction ends (F:L6: when it rolls back, one of them wins); the row of a
 * key that is taken over; for replace, serial and debounce the ready or waiting row of the job that has not started. Each look is a
 * statement of its own, so that it sees what is committed by then.
 */
export const enqueueKeyedSql = (s: string): string => `
CREATE FUNCTION ${s}.enqueue_keyed_v1(p_jobs json) RETURNS json LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
  k ${s}.job_keys;
  v_id bigint;
  v_state text;
  v_outcome text;
  v_run_at timestamptz;
  v_answers json[] := array_fill(NULL::json, ARRAY[json_array_length(p_jobs)]);
BEGIN
  PERFORM pg_current_xact_id();
  FOR v IN
    SELECT e.item, e.n, x.* FROM json_array_elements(p_jobs) WITH ORDINALITY AS e(item, n)
    CROSS JOIN LATERAL json_to_record(e.item) AS x("keySpace" text, key text, "keyMode" text, "keyPeriodMs" bigint, "keyMaxWaitMs" bigint,
      "runAt" timestamptz, "delayMs" bigint, "concurrencyKey" text)
    ORDER BY x."keySpace" COLLATE "C", x.key COLLATE "C", e.n
  LOOP
    v_outcome := NULL;
    FOR v_try IN 1..20 LOOP
      SELECT * INTO k FROM ${s}.job_keys j WHERE j.key_space = v."keySpace" AND j.key = v.key;
      IF NOT FOUND THEN
        INSERT INTO ${s}.job_keys (key_space, key, job_id) VALUES (v."keySpace", v.key, 0) ON CONFLICT DO NOTHING;
        CONTINUE WHEN NOT FOUND;
        v_outcome := 'created';
        EXIT;
      END IF;
      v_state := ${s}.state_v1(k.job_id);
      IF (CASE WHEN v."keyMode" = 'throttle' AND k.until IS NOT NULL THEN k.until <= clock_timestamp()
               ELSE coalesce(v_state, 'completed') IN ('completed', 'failed', 'cancelled') END) THEN
        -- Taken over as it was read, and only if its job has not come back meanwhile.
        PERFORM FROM ${s}.job_keys j WHERE j.key_space = v."keySpace" AND j.key = v.key AND j.job_id = k.job_id
          AND j.next_id IS NOT DISTINCT FROM k.next_id AND j.until IS NOT DISTINCT FROM k.until FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        CONTINUE WHEN v_state IS DISTINCT FROM ${s}.state_v1(k.job_id);
        IF k.next_id IS NOT NULL THEN
          UPDATE ${s}.job_keys j SET job_id = k.next_id, next_id = NULL WHERE j.key_space = v."keySpace" AND j.key = v.key;
          PERFORM ${s}.unblock_v1(k.next_id, 'key');
          CONTINUE;
        END IF;
        v_outcome := 'created';
        EXIT;
      END IF;

      v_id := k.job_id;
      IF v."keyMode" IN ('ignore', 'throttle') THEN
        v_outcome := 'existing';
      ELSIF v."keyMode" = 'serial' AND v_state <> 'running' THEN
        CONTINUE WHEN NOT ${s}.hold_v1(k.job_id);
        v_outcome := 'existing';
      ELSIF v."keyMode" = 'serial' THEN
        SELECT * INTO k FROM ${s}.job_keys j WHERE j.key_space = v."keySpace" AND j.key = v.key AND j.job_id = v_id FOR UPDATE;
        CONTINUE WHEN NOT FOUND;
        CONTINUE WHEN ${s}.state_v1(v_id) IS DISTINCT FROM 'running';
        IF k.next_id IS NULL THEN
          v_id := ${s}.enqueue_v1(json_build_array((left(v.item::text, -1) || ',"blockedOn":"key"}')::json))::bigint;
          UPDATE ${s}.job_keys j SET next_id = v_id WHERE j.key_space = v."keySpace" AND j.key = v.key;
          v_outcome := 'next';
        ELSE
          v_id := k.next_id;
          CONTINUE WHEN NOT ${s}.hold_v1(v_id);
          v_outcome := 'existing';
        END IF;
      ELSE
        -- Of a pair, one running and one waiting, the one that waits.
        IF v_state = 'running' AND k.next_id IS NOT NULL THEN v_id := k.next_id; END IF;
        v_run_at := coalesce(v."runAt", clock_timestamp() + v."delayMs" * interval '1 ms');
        IF v."keyMode" = 'debounce' THEN
          v_run_at := clock_timestamp() + v."keyPeriodMs" * interval '1 ms';
          IF v."keyMaxWaitMs" IS NOT NULL THEN
            v_run_at := least(v_run_at, (SELECT j.created_at FROM ${s}.jobs j WHERE j.id = v_id) + v."keyMaxWaitMs" * interval '1 ms');
          END IF;
        END IF;
        v_outcome := CASE WHEN ${s}.state_v1(v_id) = 'running' THEN 'started'
          ELSE ${s}.replace_v1(v_id, json_extract_path(v.item, 'payloads', '0'), v_run_at, coalesce(v."concurrencyKey", '')) END;
        IF v_outcome = 'moved' THEN v_outcome := NULL; CONTINUE; END IF;
        IF v_outcome = 'started' AND v."keyMode" = 'replace' THEN v_outcome := 'existing'; END IF;
        IF v_outcome = 'started' THEN
          v_outcome := NULL;
          PERFORM FROM ${s}.job_keys j WHERE j.key_space = v."keySpace" AND j.key = v.key AND j.job_id = k.job_id
            AND j.next_id IS NOT DISTINCT FROM k.next_id FOR UPDATE;
          CONTINUE WHEN NOT FOUND;
          v_outcome := 'created';
        END IF;
      END IF;
      EXIT;
    END LOOP;

    IF v_outcome IS NULL THEN
      RAISE EXCEPTION 'the key % is contended: it changed hands twenty times while it was looked at', v.key USING ERRCODE = '40001';
    ELSIF v_outcome = 'created' THEN
      v_id := ${s}.enqueue_v1(json_build_array(v.item))::bigint;
      UPDATE ${s}.job_keys j SET job_id = v_id, next_id = NULL,
        until = CASE WHEN v."keyMode" = 'throttle' THEN clock_timestamp() + v."keyPeriodMs" * interval '1 ms' END
      WHERE j.key_space = v."keySpace" AND j.key = v.key;
    END IF;
    v_answers[v.n] := json_build_object('id', v_id::text, 'outcome', CASE v_outcome WHEN 'next' THEN 'created' ELSE v_outcome END,
      'state', ${s}.state_v1(v_id));
  END LOOP;
  RETURN array_to_json(v_answers);
END $fn$`;

/**
 * Repairs what a release skipped, a crash cannot leave anything: keys whose job has finished, and jobs that wait for a key although no job that holds
 * it is unfinished. Bounded, from `p_after` on in the order of the keys. Locks the rows that it changes, skipping locked ones;
 * each is looked at again under its lock.
 */
export const sweepKeysSql = (s: string): string => `
CREATE FUNCTION ${s}.sweep_keys_v1(p_space text, p_key text, p_limit int, OUT repaired int, OUT last_space text, OUT last_key text)
LANGUAGE plpgsql AS $fn$
DECLARE
  v record;
BEGIN
  repaired := 0;
  -- The waiting ones first: of them there are few, and they are stuck.
  FOR v IN SELECT w.job_id FROM ${s}.waiting w WHERE w.blocked_on = 'key' ORDER BY w.job_id LIMIT p_limit LOOP
    CONTINUE WHEN EXISTS (SELECT FROM ${s}.job_keys k WHERE k.next_id = v.job_id AND ${unfinished(s, 'k.job_id')});
    PERFORM FROM ${s}.job_keys k WHERE k.next_id = v.job_id FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND AND EXISTS (SELECT FROM ${s}.job_keys k WHERE k.next_id = v.job_id);
    CONTINUE WHEN EXISTS (SELECT FROM ${s}.job_keys k WHERE k.next_id = v.job_id AND ${unfinished(s, 'k.job_id')});
    UPDATE ${s}.job_keys k SET job_id = v.job_id, next_id = NULL WHERE k.next_id = v.job_id;
    IF ${s}.unblock_v1(v.job_id, 'key') THEN repaired := repaired + 1; END IF;
  END LOOP;
  FOR v IN
    SELECT k.key_space, k.key, k.until, k.next_id IS NULL AND coalesce(k.until <= clock_timestamp(), true) AND NOT ${unfinished(s, 'k.job_id')} AS stale
    FROM ${s}.job_keys k WHERE (k.key_space, k.key) > (p_space, p_key) ORDER BY k.key_space, k.key LIMIT p_limit
  LOOP
    last_space := v.key_space;
    last_key := v.key;
    CONTINUE WHEN NOT v.stale;
    PERFORM FROM ${s}.job_keys k WHERE k.key_space = v.key_space AND k.key = v.key FOR UPDATE SKIP LOCKED;
    CONTINUE WHEN NOT FOUND;
    DELETE FROM ${s}.job_keys k WHERE k.key_space = v.key_space AND k.key = v.key AND k.next_id IS NULL
      AND coalesce(k.until <= clock_timestamp(), true) AND NOT ${unfinished(s, 'k.job_id')};
    -- A window that has passed is no repair.
    IF FOUND AND v.until IS NULL THEN repaired := repaired + 1; END IF;
  END LOOP;
END $fn$`;

const unfinished = (s: string, job: string): string => `(EXISTS (SELECT FROM ${s}.leases l WHERE l.job_id = ${job})
      OR EXISTS (SELECT FROM ${s}.ready r WHERE r.job_id = ${job}) OR EXISTS (SELECT FROM ${s}.waiting w WHERE w.job_id = ${job}))`;
