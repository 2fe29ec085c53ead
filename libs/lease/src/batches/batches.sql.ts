import { FAILED_FAST } from './stop-reasons';

/** Makes a batch; with a number of members it is sealed. Locks nothing that exists; waits for a call of the same request that has not ended. */
export const insertBatchSql = (s: string): string => `
  INSERT INTO ${s}.batches (name, sealed, members, fail_fast, hooks, request) VALUES ($1, $2::int IS NOT NULL, $2, $3, $4, $5) RETURNING id::text`;

/** The batch of a call whose reply was lost, and its members in the order of their ids. Locks nothing. */
export const batchOfRequestSql = (s: string): string => `
  SELECT b.id::text, (SELECT array_agg(j.id::text ORDER BY j.id) FROM ${s}.jobs j WHERE j.batch_id = b.id AND j.batch_id IS NOT NULL) AS jobs
  FROM ${s}.batches b WHERE b.request = $1`;

/** Locks a batch to the end of the transaction: nobody adds to it, seals it, ends it or follows its edges meanwhile. */
export const lockBatchSql = (s: string): string => `
  SELECT status, sealed, stopping, current_setting('transaction_isolation') AS isolation FROM ${s}.batches WHERE id = $1::bigint FOR NO KEY UPDATE`;

/** Members of these names. Locks nothing; the caller has the batch locked. */
export const namedSql = (s: string): string => `
  SELECT member AS name, id::text FROM ${s}.jobs WHERE batch_id = $1::bigint AND member = ANY ($2::text[]) AND batch_id IS NOT NULL AND member IS NOT NULL`;

/** See `add_edges_v1`: the caller has the batch locked. */
export const addEdgesSql = (s: string): string =>
  `SELECT ${s}.add_edges_v1($1::bigint, $2::bigint[], $3::bigint[], $4::boolean[], $5) AS answer`;

/** From now on it has as many members as it has now. */
const sealing = (s: string): string =>
  `sealed = true, members = (SELECT count(*) FROM ${s}.jobs j WHERE j.batch_id = $1::bigint AND j.batch_id IS NOT NULL)`;

/** No more members. The caller has the batch locked. */
export const sealSql = (s: string): string => `UPDATE ${s}.batches SET ${sealing(s)} WHERE id = $1::bigint`;

/** Ends a batch if nothing of it is unfinished; see `end_batches_v1`. A statement after the one that locked it. */
export const endSql = (s: string): string => `SELECT ${s}.end_batches_v1(ARRAY[$1::bigint]) AS ended`;

/** After members have ended; see `after_members_v1`. */
export const afterMembersSql = (s: string): string =>
  `SELECT ${s}.after_members_v1($1::bigint[], $2::bigint[]) AS answer`;

/** Says that a batch is being cancelled: whoever waits for a member that was cancelled is cancelled, not failed, and nothing is added. Locks its row. */
export const stopSql = (s: string): string => `
  UPDATE ${s}.batches SET stopping = true, stop_reason = CASE WHEN stopping THEN stop_reason ELSE $2 END, ${sealing(s)} WHERE id = $1::bigint AND status = 'running' RETURNING id::text`;

const summary = `b.id::text, b.name, b.status, b.sealed, b.fail_fast AS "failFast", b.stopping, b.generation, b.created_at AS "createdAt",
  b.since, b.finished_at AS "finishedAt"`;

/** A batch, and its members counted by state, in one look at all tables, each by its index of batches: those that completed are the rest. Locks nothing. */
export const batchSql = (s: string): string => `
  SELECT ${summary}, c.counts, clock_timestamp() AS now,
    coalesce(b.members, (SELECT count(*)::int FROM ${s}.jobs j WHERE j.batch_id = b.id AND j.batch_id IS NOT NULL)) AS members FROM ${s}.batches b CROSS JOIN LATERAL (
    SELECT coalesce(json_object_agg(x.state, x.n), '{}') AS counts FROM (
      SELECT 'ready' AS state, count(*)::int AS n FROM ${s}.ready r WHERE r.batch_id = b.id AND r.batch_id > 0 HAVING count(*) > 0
      UNION ALL SELECT w.reason, count(*)::int FROM ${s}.waiting w WHERE w.batch_id = b.id AND w.batch_id > 0 GROUP BY w.reason
      UNION ALL SELECT 'running', count(*)::int FROM ${s}.leases l WHERE l.batch_id = b.id AND l.batch_id > 0 HAVING count(*) > 0
      UNION ALL SELECT f.state, count(*)::int FROM ${s}.finished f
        WHERE f.batch_id = b.id AND f.batch_id > 0 AND f.state <> 'completed' AND f.finished_at >= b.created_at - interval '1 day' GROUP BY f.state) x) c
  WHERE b.id = $1::bigint`;

/** Locks nothing. */
export const statusSql = (s: string): string =>
  `SELECT status, stopping, stop_reason AS "stopReason" FROM ${s}.batches WHERE id = $1::bigint`;

/** A page of members that failed, or that failed or were cancelled since another had failed, in the order of their ids. Locks nothing. */
export const failedMembersSql = (s: string): string => `
  SELECT f.job_id::text AS id FROM ${s}.finished f
  WHERE f.batch_id = $1::bigint AND f.batch_id > 0 AND f.state <> 'completed' AND f.job_id > $2::bigint
    AND f.finished_at >= (SELECT b.created_at - interval '1 day' FROM ${s}.batches b WHERE b.id = $1::bigint)
    AND (f.state = 'failed' OR f.reason = '${FAILED_FAST}' OR (f.token IS NULL AND f.outcome = 'failed'))
  ORDER BY f.job_id LIMIT $3`;

/** A page of batches, newest first. Locks nothing. */
export const findBatchesSql = (s: string): string => `
  SELECT ${summary} FROM ${s}.batches b
  WHERE ($1::text IS NULL OR b.status = $1) AND ($2::text IS NULL OR b.name = $2) AND ($3::bigint IS NULL OR b.id < $3)
  ORDER BY b.id DESC LIMIT $4`;

/** A page of members that have ended, in the order of their ids. Locks nothing. */
export const resultsSql = (s: string): string => `
  SELECT j.id::text AS "jobId", j.member AS name, j.kind, f.state, f.result, f.reason, f.error FROM (
    SELECT x.id, x.member, x.kind, x.created_at FROM ${s}.jobs x WHERE x.batch_id = $1::bigint AND x.batch_id IS NOT NULL AND x.id > $2::bigint
    ORDER BY x.id LIMIT $3) j
  LEFT JOIN ${s}.finished f ON f.job_id = j.id AND f.finished_at >= j.created_at - interval '1 day' ORDER BY j.id`;

/** What a crash has left; see `sweep_batches_v1`. */
export const sweepSql = (s: string): string => `
  SELECT ended::text[] AS ended, of_jobs::text[] AS "ofJobs", jobs::text[] AS jobs, stop::text[] AS stop, last_batch::text AS "lastBatch",
    last_job::text AS "lastJob"
  FROM ${s}.sweep_batches_v1($1, $2, $3, $4)`;

/** See `delete_batch_v1`. */
export const deleteBatchSql = (s: string): string => `SELECT answer, deleted FROM ${s}.delete_batch_v1($1::bigint)`;
