import { inLiteral } from '../quote';

/**
 * Makes the partitions of `finished` for the UTC days from yesterday to `p_days` ahead. CREATE + CHECK + ATTACH: attaching
 * a table that already proves its bounds takes only SHARE UPDATE EXCLUSIVE on the parent, so settles go on. Two callers
 * at once: the second waits on an advisory lock and finds everything made. SECURITY DEFINER, so that a role with no right
 * to create tables can still keep the partitions ahead.
 */
export const ensurePartitionsSql = (s: string): string => `
CREATE FUNCTION ${s}.ensure_partitions_v1(p_days int) RETURNS int LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET lock_timeout = '3s' AS $fn$
DECLARE
  v_schema text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
                    WHERE c.oid = '${inLiteral(s)}.finished'::regclass);
  v_day date;
  v_name text;
  v_made int := 0;
BEGIN
  IF p_days NOT BETWEEN 0 AND 400 THEN
    RAISE EXCEPTION 'p_days must be from 0 to 400, not %', p_days USING ERRCODE = '22023';
  END IF;
  PERFORM pg_advisory_xact_lock(hashtextextended('leasehold:partitions:' || v_schema, 0));
  FOR v_day IN SELECT generate_series(current_date - 1, current_date + p_days, interval '1 day')::date LOOP
    v_name := 'finished_' || to_char(v_day, 'YYYYMMDD');
    CONTINUE WHEN to_regclass(format('%I.%I', v_schema, v_name)) IS NOT NULL;
    EXECUTE format('CREATE TABLE %I.%I (LIKE %I.finished INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)',
                   v_schema, v_name, v_schema);
    EXECUTE format('ALTER TABLE %I.%I ADD CONSTRAINT day CHECK (finished_at >= %L AND finished_at < %L AND finished_at IS NOT NULL)',
                   v_schema, v_name, v_day::timestamptz, (v_day + 1)::timestamptz);
    EXECUTE format('ALTER TABLE %I.finished ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
                   v_schema, v_schema, v_name, v_day::timestamptz, (v_day + 1)::timestamptz);
    EXECUTE format('ALTER TABLE %I.%I DROP CONSTRAINT day', v_schema, v_name);
    v_made := v_made + 1;
  END LOOP;
  RETURN v_made;
END $fn$`;
