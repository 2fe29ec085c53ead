import { inLiteral } from '../quote';

/**
 * `incarnation_v1` names the server's present life: it changes at a restart (postmaster start), a crash restart (the
 * statistics are reset) and a promotion (timeline). Needs a primary; on a standby it raises, which is right: nothing of ours
 * may run there.
 *
 * `advance_tokens_v1` runs once on every new connection, before its first use. After an asynchronous failover or a restore the
 * sequence may repeat tokens that the lost server had issued; the first connection to a new incarnation jumps past them.
 * Locks the one row of `incarnation` when it changes; otherwise only reads it.
 */
export const incarnationSql = (s: string): string[] => [
  `CREATE FUNCTION ${s}.incarnation_v1() RETURNS text LANGUAGE sql STABLE AS $$
    SELECT pg_postmaster_start_time()::text || '/' || coalesce((SELECT stats_reset::text FROM pg_stat_wal), '-')
           || '/' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)
  $$`,
  `ALTER FUNCTION ${s}.incarnation_v1() SET timezone = 'UTC'`,
  `CREATE FUNCTION ${s}.advance_tokens_v1() RETURNS boolean LANGUAGE plpgsql AS $$
  DECLARE v_now text := ${s}.incarnation_v1();
  BEGIN
    IF EXISTS (SELECT FROM ${s}.incarnation WHERE value = v_now) THEN RETURN false; END IF;
    UPDATE ${s}.incarnation SET value = v_now WHERE value <> v_now;
    IF NOT FOUND THEN RETURN false; END IF;
    PERFORM setval('${inLiteral(s)}.tokens', nextval('${inLiteral(s)}.tokens') + 1000000);
    -- And past the positions: claims begin where the last ones ended.
    PERFORM setval('${inLiteral(s)}.positions', nextval('${inLiteral(s)}.positions') + 1000000);
    RETURN true;
  END $$`,
];
