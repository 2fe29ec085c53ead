import { inLiteral } from '../storage/schema/quote';

/** A call of the clock by its bare name, as a regular expression for the server. */
const CALL = '(?<![.\\w"])clock_timestamp\\(\\)';

/** `s`: the quoted name of Leasehold's schema, `c`: of its clock's. Run in one transaction, under {@link lockClockSql}. */
export const createClockSql = (s: string, c: string): string[] => [
  `CREATE SCHEMA IF NOT EXISTS ${c}`,
  `CREATE TABLE IF NOT EXISTS ${c}.clock (
    one       boolean PRIMARY KEY DEFAULT true CHECK (one),
    shift_us  bigint NOT NULL DEFAULT 0  -- microseconds, not an interval: one with days would follow the session's time zone
  )`,
  `INSERT INTO ${c}.clock DEFAULT VALUES ON CONFLICT DO NOTHING`,
  `CREATE OR REPLACE FUNCTION ${c}.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS $fn$
    SELECT pg_catalog.clock_timestamp() + (SELECT shift_us FROM ${c}.clock) * interval '1 microsecond'
  $fn$`,
  makeDaysSql(s, c),
];

/** Two test files that begin at once on one schema: the second waits and finds everything made. */
export const lockClockSql = (s: string): string =>
  `SELECT pg_advisory_xact_lock(hashtextextended('leasehold:clock:${inLiteral(s)}', 0))`;

/** Column defaults of the schema that read the database's own clock: they were bound to it when their tables were made. `$1`: the clock's schema. */
export const defaultsSql = (s: string): string => `
  SELECT format('ALTER TABLE %s ALTER COLUMN %I SET DEFAULT %s', a.attrelid::regclass, a.attname,
    regexp_replace(x.expression, '${CALL}', quote_ident($1::text) || '.clock_timestamp()', 'g')) AS statement
  FROM pg_attrdef d JOIN pg_attribute a ON a.attrelid = d.adrelid AND a.attnum = d.adnum
  JOIN pg_class t ON t.oid = d.adrelid
  CROSS JOIN LATERAL (SELECT pg_get_expr(d.adbin, d.adrelid) AS expression) x
  WHERE t.relnamespace = '${inLiteral(s)}'::regnamespace AND x.expression ~ '${CALL}'`;

/**
 * Functions of the schema that read the clock, to get a search path in which the test's comes first. An unqualified name is looked for in
 * pg_catalog before all others, unless pg_catalog stands in the path itself: then in the path's order. Whoever calls such a function gets the
 * test's clock, also in a transaction of the user's own. What stood in the path before stays behind, for triggers that users have put on our
 * tables. `$1`: the clock's schema.
 */
export const functionsSql = (s: string): string => `
  SELECT format('ALTER FUNCTION %s SET search_path = %I, pg_catalog%s', p.oid::regprocedure, $1::text,
    regexp_replace(', ' || coalesce(own.path, nullif(current_setting('search_path'), ''), 'pg_catalog'), ', *(pg_catalog|"")(?=,|$)', '', 'g')) AS statement
  FROM pg_proc p
  LEFT JOIN LATERAL (SELECT substr(x, 13) AS path FROM unnest(p.proconfig) AS x WHERE x LIKE 'search_path=%') own ON true
  WHERE p.pronamespace = '${inLiteral(s)}'::regnamespace AND p.prosrc ~ '${CALL}'
    AND NOT starts_with(coalesce(own.path, ''), quote_ident($1::text) || ',')`;

/**
 * Days of `finished` for a time that tests have gone to, named and made as `ensure_partitions_v1` does, which looks at the real date only. Attached
 * with a CHECK, so that an open transaction that has written to `finished` does not keep it waiting.
 */
const makeDaysSql = (s: string, c: string): string => `
CREATE OR REPLACE FUNCTION ${c}.make_days(p_from date, p_to date) RETURNS int LANGUAGE plpgsql SET timezone = 'UTC' SET lock_timeout = '3s' AS $fn$
DECLARE
  v_schema text := (SELECT n.nspname FROM pg_class k JOIN pg_namespace n ON n.oid = k.relnamespace WHERE k.oid = '${inLiteral(s)}.finished'::regclass);
  v_day date;
  v_name text;
  v_made int := 0;
BEGIN
  PERFORM pg_advisory_xact_lock(hashtextextended('leasehold:partitions:' || v_schema, 0));
  FOR v_day IN SELECT generate_series(p_from, p_to, interval '1 day')::date LOOP
    v_name := 'finished_' || to_char(v_day, 'YYYYMMDD');
    CONTINUE WHEN to_regclass(format('%I.%I', v_schema, v_name)) IS NOT NULL;
    EXECUTE format('CREATE TABLE %I.%I (LIKE %I.finished INCLUDING DEFAULTS INCLUDING CONSTRAINTS INCLUDING INDEXES)', v_schema, v_name, v_schema);
    EXECUTE format('ALTER TABLE %I.%I ADD CONSTRAINT day CHECK (finished_at >= %L AND finished_at < %L AND finished_at IS NOT NULL)',
      v_schema, v_name, v_day::timestamptz, (v_day + 1)::timestamptz);
    EXECUTE format('ALTER TABLE %I.finished ATTACH PARTITION %I.%I FOR VALUES FROM (%L) TO (%L)',
      v_schema, v_schema, v_name, v_day::timestamptz, (v_day + 1)::timestamptz);
    EXECUTE format('ALTER TABLE %I.%I DROP CONSTRAINT day', v_schema, v_name);
    v_made := v_made + 1;
  END LOOP;
  RETURN v_made;
END $fn$`;

/** The days around a moment, so that a test may cross midnight. */
export const daysAroundSql = (c: string): string =>
  `SELECT ${c}.make_days(($1::timestamptz AT TIME ZONE 'UTC')::date - 1, ($1::timestamptz AT TIME ZONE 'UTC')::date + 2)`;

/** The test's time. Locks nothing. */
export const nowSql = (c: string): string => `SELECT ${c}.clock_timestamp() AS now`;

/** Sets the test's time to a moment; it goes on from there. Locks the clock's one row. */
export const setClockSql = (c: string): string => `
  UPDATE ${c}.clock SET shift_us = round(extract(epoch FROM $1::timestamptz - pg_catalog.clock_timestamp()) * 1000000)::bigint`;

/** Moves the test's time on by so many milliseconds. Locks the clock's one row. */
export const advanceClockSql = (c: string): string => `UPDATE ${c}.clock SET shift_us = shift_us + $1::bigint * 1000`;

/** Back to the real time. Locks the clock's one row, if it is to be changed. */
export const resetClockSql = (c: string): string => `UPDATE ${c}.clock SET shift_us = 0 WHERE shift_us <> 0`;
