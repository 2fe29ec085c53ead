import { COMMANDS } from '../../../jobs/transitions';
import { inLiteral } from '../quote';

/** `command state` -> effect, of the table in transitions.ts. */
const effects = Object.entries(COMMANDS)
  .flatMap(([command, states]) =>
    Object.entries(states).map(([state, effect]) => `WHEN '${command} ${state}' THEN '${effect}'`),
  )
  .join(' ');

const MOVED =
  'job_id, attempt, crashes, releases, snoozes, payload_bytes, priority, suspect, keyed, saved, queue, kind, concurrency_key, batch_id';

/**
 * Does one command to each of some jobs, in the order of their ids, by the table in transitions.ts. Answers one row a job: `answer` is the
 * effect, or `illegal` (with the state that it is in; nothing is changed), `unknown`, `key-held` (its key is `holder`'s by now),
 * `needs-failed` (a member that it needs, `holder`, has not completed), `batch-stopping` (its batch is being cancelled), `member` (it goes only with its whole batch), `referenced` (a foreign key of the user's holds it), or `contended`: it moved each of five times that it was looked for, or somebody keeps it
 * locked for longer than lock_timeout.
 * `state`: before, `now_in`: after.
 *
 * A job that moves between the look and the lock is looked for again, in a statement of its own: zero rows of one look are no answer.
 * Locks the state row of each job, waiting for whoever has it (a claim and a poll hold theirs for a moment), then its key, then (retry) its batch, and to delete it its
 * row of jobs; a stop request locks the lease and leaves it where it is. It waits for a moment only (lock_timeout), and for a row of jobs not
 * at all.
 */
export const steerSql = (s: string): string => `
CREATE FUNCTION ${s}.steer_v1(p_command text, p_jobs bigint[], p_reason text, p_priority int)
RETURNS TABLE (job bigint, answer text, state text, now_in text, token bigint, worker text, holder bigint, queue text, kind text, batch bigint)
LANGUAGE plpgsql AS $fn$
DECLARE
  v_effect text;
  v_now timestamptz;
  v_waits int;
  w ${s}.waiting;
  f ${s}.finished;
BEGIN
  PERFORM pg_current_xact_id();
  -- A check that the user put off to the commit would fail the whole lot there.
  SET CONSTRAINTS ALL IMMEDIATE;
  FOR job IN SELECT DISTINCT x.id FROM unnest(p_jobs) AS x(id) ORDER BY x.id LOOP
    v_waits := 0;
    answer := 'contended'; token := NULL; worker := NULL; holder := NULL; now_in := NULL; queue := NULL; kind := NULL; batch := 0;
    FOR v_try IN 1..5 LOOP
      state := ${s}.state_v1(job);
      IF state IS NULL THEN answer := 'unknown'; EXIT; END IF;
      SELECT j.queue, j.kind, coalesce(j.batch_id, 0) INTO queue, kind, batch FROM ${s}.jobs j WHERE j.id = job;
      v_effect := CASE p_command || ' ' || state ${effects} ELSE 'illegal' END;
      now_in := state;
      IF v_effect IN ('illegal', 'unchanged') THEN answer := v_effect; EXIT; END IF;
      IF v_effect = 'deleted' AND batch > 0 THEN answer := 'member'; EXIT; END IF;
      v_now := clock_timestamp();
      w := NULL;

      BEGIN
        -- Without waiting: rows of the user's that are about to point at jobs are locked in an order of their own.
        IF v_effect = 'deleted' THEN
          PERFORM FROM ${s}.jobs j WHERE j.id = job FOR UPDATE SKIP LOCKED;
          IF NOT FOUND AND EXISTS (SELECT FROM ${s}.jobs j WHERE j.id = job) THEN RAISE lock_not_available; END IF;
        END IF;
        IF state = 'running' THEN
          IF v_effect = 'requested' THEN
            UPDATE ${s}.leases l SET cancel_requested = l.cancel_requested OR p_command = 'cancel',
              pause_requested = l.pause_requested OR p_command = 'pause', stop_reason = coalesce(p_reason, l.stop_reason)
            WHERE l.job_id = job RETURNING l.token, l.worker_id INTO token, worker;
          ELSIF v_effect = 'withdrawn' THEN
            UPDATE ${s}.leases l SET pause_requested = false WHERE l.job_id = job AND l.pause_requested RETURNING l.token, l.worker_id INTO token, worker;
            IF NOT FOUND THEN
              CONTINUE WHEN ${s}.state_v1(job) IS DISTINCT FROM 'running';
              v_effect := 'unchanged';
            END IF;
          ELSIF v_effect = 'reprioritised' THEN
            UPDATE ${s}.leases l SET priority = p_priority WHERE l.job_id = job RETURNING l.token, l.worker_id INTO token, worker;
          ELSE
            SELECT l.token, l.worker_id INTO token, worker FROM ${s}.leases l WHERE l.job_id = job;
            CONTINUE WHEN NOT FOUND;
            PERFORM FROM ${s}.move_v1(json_build_array(json_build_object('job', job, 'token', token, 'worker', worker, 'event', 'revoke',
              'reason', p_reason)), false);
            CONTINUE WHEN NOT FOUND;
            now_in := 'cancelled';
          END IF;
          CONTINUE WHEN token IS NULL AND v_effect <> 'unchanged';

        ELSIF state IN ('completed', 'failed', 'cancelled') THEN
          DELETE FROM ${s}.finished x USING ${s}.jobs j WHERE j.id = job AND x.job_id = job AND x.finished_at >= j.created_at - interval '1 day'
            RETURNING x.* INTO f;
          IF NOT FOUND THEN CONTINUE; END IF;
          IF v_effect = 'deleted' THEN
            PERFORM ${s}.forget_v1(ARRAY[job]);
            now_in := NULL;
          ELSE
            holder := ${s}.retake_key_v1(job);
            IF holder IS NOT NULL THEN RAISE EXCEPTION 'held' USING ERRCODE = 'LH001'; END IF;
            IF f.token IS NOT NULL THEN
              INSERT INTO ${s}.runs (job_id, token, started_at, ended_at, attempt, outcome, worker_id, error)
              VALUES (job, f.token, coalesce(f.started_at, f.finished_at), f.finished_at, f.attempt, f.outcome, coalesce(f.worker_id, ''),
                coalesce(f.error, CASE WHEN f.reason IS NOT NULL THEN json_build_object('message', f.reason) END));
            END IF;
            IF batch > 0 THEN
              PERFORM ${s}.reopen_batch_v1(batch);
              IF EXISTS (SELECT FROM ${s}.batches x WHERE x.id = batch AND x.stopping) THEN RAISE EXCEPTION 'stopping' USING ERRCODE = 'LH003'; END IF;
              SELECT d.needs INTO holder FROM ${s}.job_dependencies d JOIN ${s}.finished x ON x.job_id = d.needs AND x.batch_id = batch
              WHERE d.job_id = job AND NOT d.met AND NOT d.on_finished AND x.state <> 'completed' LIMIT 1;
              IF FOUND THEN RAISE EXCEPTION 'needs' USING ERRCODE = 'LH002'; END IF;
            END IF;
            now_in := CASE WHEN EXISTS (SELECT FROM ${s}.job_dependencies d WHERE d.job_id = job AND NOT d.met) THEN 'blocked' ELSE 'ready' END;
            SELECT j.id, 0, 0, 0, 0, j.payload_bytes, f.priority, j.max_crashes <= 1, j.key IS NOT NULL,
              EXISTS (SELECT FROM ${s}.checkpoints c WHERE c.job_id = j.id), f.queue, f.kind, coalesce(j.concurrency_key, ''), batch
            INTO ${MOVED.replace(/(\w+)/g, 'w.$1')} FROM ${s}.jobs j WHERE j.id = job;
            IF now_in = 'ready' THEN
              INSERT INTO ${s}.ready (${MOVED}) VALUES (${MOVED.replace(/(\w+)/g, 'w.$1')});
            ELSE
              INSERT INTO ${s}.waiting (${MOVED}, reason, blocked_on) VALUES (${MOVED.replace(/(\w+)/g, 'w.$1')}, 'blocked', 'jobs');
            END IF;
          END IF;

        ELSE
          -- Ready or waiting. Its row is locked by taking it out; whoever needs it to stay puts it back.
          IF v_effect = 'reprioritised' AND state <> 'ready' THEN
            UPDATE ${s}.waiting x SET priority = p_priority WHERE x.job_id = job AND x.reason = state;
            CONTINUE WHEN NOT FOUND;
          ELSE
            IF state = 'ready' THEN
              DELETE FROM ${s}.ready x WHERE x.job_id = job RETURNING ${MOVED.replace(/(\w+)/g, 'x.$1')}
              INTO ${MOVED.replace(/(\w+)/g, 'w.$1')};
            ELSE
              DELETE FROM ${s}.waiting x WHERE x.job_id = job AND x.reason = state RETURNING x.* INTO w;
            END IF;
            IF NOT FOUND THEN CONTINUE; END IF;
            IF v_effect = 'deleted' THEN
              PERFORM ${s}.release_keys_v1(ARRAY[job]);
              PERFORM ${s}.forget_v1(ARRAY[job]);
              now_in := NULL;
            ELSIF v_effect = 'cancelled' THEN
              INSERT INTO ${s}.finished (job_id, finished_at, attempt, crashes, releases, snoozes, priority, state, outcome, queue, kind, reason,
                batch_id)
              VALUES (job, v_now, w.attempt, w.crashes, w.releases, w.snoozes, w.priority, 'cancelled', 'cancelled', w.queue, w.kind,
                coalesce(p_reason, 'cancelled'), w.batch_id);
              IF w.keyed THEN PERFORM ${s}.release_keys_v1(ARRAY[job]); END IF;
              now_in := 'cancelled';
            ELSIF v_effect = 'paused' THEN
              INSERT INTO ${s}.waiting (${MOVED}, reason, run_at)
              VALUES (${MOVED.replace(/(\w+)/g, 'w.$1')}, 'paused', w.run_at);
              now_in := 'paused';
            ELSIF v_effect = 'resumed' AND EXISTS (SELECT FROM ${s}.job_keys k WHERE k.next_id = job) THEN
              INSERT INTO ${s}.waiting (${MOVED}, reason, blocked_on, run_at)
              VALUES (${MOVED.replace(/(\w+)/g, 'w.$1')}, 'blocked', 'key', w.run_at);
              now_in := 'blocked';
            ELSIF v_effect = 'resumed' AND EXISTS (SELECT FROM ${s}.job_dependencies d WHERE d.job_id = job AND NOT d.met) THEN
              INSERT INTO ${s}.waiting (${MOVED}, reason, blocked_on, run_at)
              VALUES (${MOVED.replace(/(\w+)/g, 'w.$1')}, 'blocked', 'jobs', w.run_at);
              now_in := 'blocked';
            ELSIF v_effect = 'resumed' AND w.run_at > v_now THEN
              INSERT INTO ${s}.waiting (${MOVED}, reason, run_at)
              VALUES (${MOVED.replace(/(\w+)/g, 'w.$1')}, 'scheduled', w.run_at);
              now_in := 'scheduled';
            ELSE
              INSERT INTO ${s}.ready (${MOVED}, position)
              VALUES (${MOVED.replace(/(\w+)/g, 'w.$1').replace('w.priority', "CASE WHEN v_effect = 'reprioritised' THEN p_priority ELSE w.priority END")},
                nextval('${inLiteral(s)}.positions') - CASE WHEN v_effect = 'hurried' THEN 4611686018427387904 ELSE 0 END);
              now_in := 'ready';
            END IF;
          END IF;
        END IF;
      -- One job's trouble is its own: what was done to it is undone, and the others go on.
      EXCEPTION
        WHEN foreign_key_violation OR restrict_violation THEN v_effect := 'referenced'; now_in := state;
        WHEN SQLSTATE 'LH001' THEN v_effect := 'key-held'; now_in := state;
        WHEN SQLSTATE 'LH002' THEN v_effect := 'needs-failed'; now_in := state;
        WHEN SQLSTATE 'LH003' THEN v_effect := 'batch-stopping'; now_in := state;
        WHEN lock_not_available OR deadlock_detected THEN
          v_effect := 'contended';
          now_in := state;
          v_waits := v_waits + 1;
          CONTINUE WHEN v_waits < 2;
      END;
      answer := v_effect;
      EXIT;
    END LOOP;
    RETURN NEXT;
  END LOOP;
END $fn$`;

/** Removes everything about jobs that stand in no state table any more. */
export const forgetSql = (s: string): string => `
CREATE FUNCTION ${s}.forget_v1(p_jobs bigint[]) RETURNS int LANGUAGE plpgsql AS $fn$
DECLARE
  v_count int;
BEGIN
  DELETE FROM ${s}.jobs WHERE id = ANY (p_jobs);
  GET DIAGNOSTICS v_count = ROW_COUNT;
  DELETE FROM ${s}.runs WHERE job_id = ANY (p_jobs);
  DELETE FROM ${s}.checkpoints WHERE job_id = ANY (p_jobs);
  RETURN v_count;
END $fn$`;

/** A finished job that comes back takes its key again. Returns the unfinished job that holds it by now, or null. Locks the key's row. */
export const retakeKeySql = (s: string): string => `
CREATE FUNCTION ${s}.retake_key_v1(p_job bigint) RETURNS bigint LANGUAGE plpgsql AS $fn$
DECLARE
  v_space text;
  v_key text;
  v_holder bigint;
BEGIN
  SELECT key_space, key INTO v_space, v_key FROM ${s}.jobs WHERE id = p_job AND key IS NOT NULL;
  IF NOT FOUND THEN RETURN NULL; END IF;
  INSERT INTO ${s}.job_keys (key_space, key, job_id) VALUES (v_space, v_key, p_job) ON CONFLICT DO NOTHING;
  IF FOUND THEN RETURN NULL; END IF;
  SELECT coalesce(k.next_id, k.job_id) INTO v_holder FROM ${s}.job_keys k WHERE k.key_space = v_space AND k.key = v_key FOR UPDATE;
  IF NOT FOUND THEN RETURN ${s}.retake_key_v1(p_job); END IF;
  IF v_holder <> p_job AND ${s}.state_v1(v_holder) NOT IN ('completed', 'failed', 'cancelled') THEN RETURN v_holder; END IF;
  UPDATE ${s}.job_keys k SET job_id = p_job, next_id = NULL WHERE k.key_space = v_space AND k.key = v_key;
  RETURN NULL;
END $fn$`;
