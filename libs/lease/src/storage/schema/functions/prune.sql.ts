import { inLiteral } from '../quote';

/**
 * The days that `finished` is partitioned into, the oldest first, by the bounds of its partitions: an operator's own partition of another
 * length counts too, one without a beginning or an end does not. Locks nothing.
 */
export const finishedDaysSql = (s: string): string => `
CREATE FUNCTION ${s}.finished_days_v1(OUT part text, OUT from_at timestamptz, OUT to_at timestamptz) RETURNS SETOF record
LANGUAGE sql STABLE SET timezone = 'UTC' SET datestyle = 'ISO' AS $fn$
  -- Not by regclass, which for one that is dropped meanwhile says a number.
  SELECT pg_catalog.format('%I.%I', n.nspname, c.relname), b.bounds[1]::timestamptz, b.bounds[2]::timestamptz
  FROM pg_catalog.pg_inherits i JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
  CROSS JOIN LATERAL pg_catalog.regexp_match(pg_catalog.pg_get_expr(c.relpartbound, c.oid), 'FROM \\(''([^'']+)''\\) TO \\(''([^'']+)''\\)') AS b(bounds)
  WHERE i.inhparent = '${inLiteral(s)}.finished'::regclass AND b.bounds IS NOT NULL
  ORDER BY 2
$fn$`;

/**
 * One batch of retention: looks at no more than about p_limit finished jobs, and for a third of a second, and deletes those that are past their time,
 * with their runs and checkpoints; not members of batches, which go as a whole (`prune_batches_v1`). The time counts from finished_at. A queue's own keep_*_ms wins over the parameters (null there: the
 * parameter; -1: for ever), of which null is for ever.
 *
 * Goes through the days from the oldest, and through each in the order of job_id, from the place that the batch before returned (at first
 * '-infinity' and 0): what is kept or held is passed, and is looked at again only by the next pass. `next_from` null: this pass is done.
 * Days in which nothing can be due are not opened. `held`: past their time and kept all the same, because somebody has them locked or a
 * foreign key of the user's holds them; `why`: what the database said of the last one that it refused.
 *
 * Locks, and waits for none of them: the finished rows, then their rows of jobs, each in the order of job_id and skipping locked ones. Whoever
 * has a finished row locked is taking the job back (retry) or deleting it, here or in another pass; whoever has its row of jobs locked is about
 * to point at it. With the first nobody can bring the job back, with the second nobody can begin to point at it, so what is then looked up
 * stays true until the end. runs and checkpoints are written under a lease only, and there is none. What is left to wait for are rows of the
 * user's own that a foreign key takes along, for 10 ms each: who has one locked may be waiting for one of ours (seen with 200 ms, where a
 * deletion by hand, at the second after which the server looks for deadlocks, found itself in one). The 200 ms are for whoever alters a table.
 */
export const pruneSql = (s: string): string => `
CREATE FUNCTION ${s}.prune_v1(p_completed bigint, p_failed bigint, p_cancelled bigint, p_from timestamptz, p_after bigint, p_limit int,
  OUT deleted int, OUT held int, OUT why text, OUT next_from timestamptz, OUT next_after bigint)
LANGUAGE plpgsql SET timezone = 'UTC' SET datestyle = 'ISO' SET lock_timeout = '200ms' AS $fn$
DECLARE
  v_now timestamptz := clock_timestamp();
  v_until timestamptz := v_now + interval '300 ms';
  v_least bigint;
  v_left int := p_limit;
  v_day record;
  v_key record;
  v_count int;
  v_last bigint;
  v_due bigint[];
  v_free bigint[];
  v_held bigint[];
  v_done record;
BEGIN
  PERFORM pg_current_xact_id();
  deleted := 0;
  held := 0;
  -- A check that the user put off to the commit would fail the whole batch there.
  SET CONSTRAINTS ALL IMMEDIATE;
  v_least := least(p_completed, p_failed, p_cancelled, (SELECT min(k.ms) FROM ${s}.queues q
    CROSS JOIN LATERAL (VALUES (q.keep_completed_ms), (q.keep_failed_ms), (q.keep_cancelled_ms)) AS k(ms) WHERE k.ms >= 0));

  FOR v_day IN
    SELECT d.from_at, d.to_at FROM ${s}.finished_days_v1() d
    WHERE d.from_at >= p_from AND date_part('epoch', v_now - d.from_at) * 1000 >= v_least ORDER BY d.from_at
  LOOP
    next_from := v_day.from_at;
    next_after := CASE WHEN v_day.from_at = p_from THEN p_after ELSE 0 END;
    LOOP
      EXECUTE format('SELECT count(*), max(x.job_id) FROM (
        SELECT f.job_id FROM ${inFormat(s)}.finished f WHERE ${inDay} AND f.job_id > $1 ORDER BY f.job_id LIMIT $2) x', v_day.from_at, v_day.to_at)
      INTO v_count, v_last USING next_after, least(v_left, 100);
      EXIT WHEN v_count = 0;

      EXECUTE format('SELECT array_agg(x.job_id) FROM (
        SELECT f.job_id FROM ${inFormat(s)}.finished f LEFT JOIN ${inFormat(s)}.queues q ON q.name = f.queue
        WHERE ${inDay} AND f.job_id > $1 AND f.job_id <= $2 AND f.batch_id = 0 AND date_part(''epoch'', $3 - f.finished_at) * 1000 >= nullif(CASE f.state
          WHEN ''completed'' THEN coalesce(q.keep_completed_ms, $4) WHEN ''failed'' THEN coalesce(q.keep_failed_ms, $5)
          ELSE coalesce(q.keep_cancelled_ms, $6) END, -1)
        ORDER BY f.job_id FOR UPDATE OF f SKIP LOCKED) x', v_day.from_at, v_day.to_at)
      INTO v_due USING next_after, v_last, v_now, p_completed, p_failed, p_cancelled;

      IF v_due IS NOT NULL THEN
        v_free := ARRAY(SELECT j.id FROM ${s}.jobs j WHERE j.id = ANY (v_due) ORDER BY j.id FOR UPDATE SKIP LOCKED);
        v_held := ARRAY(SELECT j.id FROM ${s}.jobs j WHERE j.id = ANY (v_due) AND j.id <> ALL (v_free));
        -- Looked up, and not only found out by trying: a job that is held for good would be tried, and rolled back, in every pass.
        FOR v_key IN ${holdingKeys(s)} LOOP
          EXECUTE format('SELECT $1 || ARRAY(SELECT DISTINCT x.%1$I::bigint FROM %2$s x WHERE x.%1$I = ANY ($2))', v_key.col, v_key.rel)
          INTO v_held USING v_held, v_due;
        END LOOP;
        v_free := ARRAY(SELECT u.id FROM unnest(v_due) AS u(id) WHERE u.id <> ALL (v_held));
        SELECT * INTO v_done FROM ${s}.prune_these_v1(v_free, v_day.from_at, v_day.to_at, v_until);
        deleted := deleted + v_done.deleted;
        held := held + cardinality(v_due) - v_done.deleted;
        why := coalesce(v_done.why, why);
      END IF;
      next_after := v_last;
      v_left := v_left - v_count;
      IF v_left <= 0 OR clock_timestamp() > v_until THEN RETURN; END IF;
    END LOOP;
  END LOOP;
  next_from := NULL;
  next_after := NULL;
END $fn$`;

const inFormat = (s: string): string => inLiteral(s).replaceAll('%', '%%');

/** Bounds that are constants in the text: then the other partitions are neither locked nor planned. */
const inDay = 'f.finished_at >= %1$L AND f.finished_at < %2$L';

/** Foreign keys that refuse the deletion of a job, as far as this role may read their tables. The others are found out by trying. */
const holdingKeys = (s: string): string => `
          SELECT c.conrelid::regclass AS rel, a.attname AS col FROM pg_catalog.pg_constraint c
          JOIN pg_catalog.pg_class t ON t.oid = c.conrelid
          JOIN pg_catalog.pg_attribute a ON a.attrelid = c.conrelid AND a.attnum = c.conkey[1]
          WHERE c.confrelid = '${inLiteral(s)}.jobs'::regclass AND c.contype = 'f' AND c.confdeltype IN ('a', 'r') AND c.conparentid = 0
            AND has_schema_privilege(t.relnamespace, 'USAGE') AND has_column_privilege(c.conrelid, a.attnum, 'SELECT')`;

/**
 * Deletes these finished jobs and everything about them, whose finished rows and rows of jobs the caller has locked. When the database
 * refuses (a foreign key that could not be looked up, a trigger, a row of the user's that somebody has locked), each half is tried by
 * itself, down to the one that it is about, which stays whole; after p_until what has been refused is left. The next pass tries again.
 */
export const pruneTheseSql = (s: string): string => `
CREATE FUNCTION ${s}.prune_these_v1(p_jobs bigint[], p_from timestamptz, p_to timestamptz, p_until timestamptz, OUT deleted int, OUT why text)
LANGUAGE plpgsql SET lock_timeout = '10ms' AS $fn$
DECLARE
  v_half int := cardinality(p_jobs) / 2;
  v_done record;
BEGIN
  deleted := 0;
  IF cardinality(p_jobs) = 0 THEN RETURN; END IF;
  BEGIN
    -- Their rows of jobs first: if one is held, nothing else has been written.
    PERFORM ${s}.forget_v1(p_jobs);
    IF EXISTS (SELECT FROM ${s}.jobs j WHERE j.id = ANY (p_jobs)) THEN RAISE EXCEPTION 'a trigger keeps a row of jobs'; END IF;
    EXECUTE format('DELETE FROM ${inFormat(s)}.finished f WHERE ${inDay} AND f.job_id = ANY ($1)', p_from, p_to) USING p_jobs;
    deleted := cardinality(p_jobs);
    RETURN;
  EXCEPTION WHEN OTHERS THEN
    why := SQLERRM;
  END;
  IF v_half = 0 OR clock_timestamp() > p_until THEN RETURN; END IF;
  FOR v_done IN
    SELECT p.* FROM (VALUES (p_jobs[:v_half]), (p_jobs[v_half + 1:])) AS h(jobs)
    CROSS JOIN LATERAL ${s}.prune_these_v1(h.jobs, p_from, p_to, p_until) p
  LOOP
    deleted := deleted + v_done.deleted;
    why := coalesce(v_done.why, why);
  END LOOP;
END $fn$`;

/**
 * Drops the oldest day of `finished` that has been over for two days and holds nothing, and returns its name; null if there is none, or if it
 * can't be had just now. SECURITY DEFINER, as for making them.
 *
 * The day is locked first, against writers only, and found empty under that: it may take a while to read what vacuum has left of it. Then the
 * parent is, which every settle needs: for that it waits 200 ms at most, and so do they; once it has that it waits for nothing. A retry takes
 * the two the other way round: then that limit comes before any deadlock_timeout, and the retry wins.
 */
export const dropEmptyDaySql = (s: string): string => `
CREATE FUNCTION ${s}.drop_empty_day_v1() RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '200ms' AS $fn$
DECLARE
  v_day record;
  v_empty boolean;
BEGIN
  IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
    RAISE EXCEPTION 'under % what was added since would not be seen', current_setting('transaction_isolation') USING ERRCODE = '25001';
  END IF;
  FOR v_day IN
    SELECT d.part FROM ${s}.finished_days_v1() d WHERE d.to_at <= clock_timestamp() - interval '2 days' ORDER BY d.from_at
  LOOP
    BEGIN
      -- A look without a lock: most days are not empty.
      EXECUTE format('SELECT NOT EXISTS (SELECT FROM %s)', v_day.part) INTO v_empty;
      CONTINUE WHEN NOT v_empty;
      EXECUTE format('LOCK TABLE ONLY %s IN SHARE ROW EXCLUSIVE MODE', v_day.part);
      EXECUTE format('SELECT NOT EXISTS (SELECT FROM %s)', v_day.part) INTO v_empty;
      CONTINUE WHEN NOT v_empty;
      LOCK TABLE ONLY ${s}.finished IN ACCESS EXCLUSIVE MODE;
      EXECUTE format('LOCK TABLE ONLY %s IN ACCESS EXCLUSIVE MODE NOWAIT', v_day.part);
      EXECUTE format('DROP TABLE %s', v_day.part);
      RETURN v_day.part;
    EXCEPTION
      WHEN lock_not_available OR deadlock_detected THEN RETURN NULL;
      -- Another leader was first; or somebody's view stands on it.
      WHEN undefined_table OR dependent_objects_still_exist THEN NULL;
    END;
  END LOOP;
  RETURN NULL;
END $fn$`;
