/** Settles completions and claims, in one round trip. Locks the leases named and the ready rows taken; see `step_v1`. */
export const stepSql = (s: string): string =>
  `SELECT applied, jobs, refused, scan FROM ${s}.step_v1($1, $2::bigint[], $3::bigint[], $4::json, $5::bigint, $6::int, $7::text[],
    $8::text[], $9::int[], $10::int, $11::bigint, $12::int[], $13::int[], $14::int[],
    $15::bigint[], $16::bigint[], $17::int[], $18::int[])`;

/** Takes jobs out of their leases under the fence, without those that somebody else has locked; see `move_v1`. */
export const moveSql = (s: string): string => `SELECT * FROM ${s}.move_v1($1::json, true)`;

/**
 * Of outcomes that moved nothing: `outcome` is what is on record for this lease, `held`: the lease is still there, so somebody had it locked. Both null: it
 * was lost. Matches worker and token in one statement over all places. Locks nothing. Run in a later statement.
 */
export const whereaboutsSql = (s: string): string => `
  SELECT k.job::text AS job_id, k.token::text AS token,
    EXISTS (SELECT FROM ${s}.leases l WHERE l.job_id = k.job AND l.token = k.token AND l.worker_id = k.worker) AS held,
    coalesce((SELECT f.outcome FROM ${s}.finished f WHERE f.job_id = k.job AND f.token = k.token AND f.worker_id = k.worker LIMIT 1),
      (SELECT r.outcome FROM ${s}.runs r WHERE r.job_id = k.job AND r.token = k.token AND r.worker_id = k.worker LIMIT 1)) AS outcome
  FROM unnest($1::bigint[], $2::bigint[], $3::text[]) AS k(job, token, worker)`;

/** The last checkpoints of jobs that have saved one. Locks nothing. */
export const checkpointsSql = (s: string): string =>
  `SELECT job_id::text AS id, version, checkpoint FROM ${s}.checkpoints WHERE job_id = ANY ($1::bigint[]) AND version > 0`;

/** Payloads as rows, for jobs that are leased: nobody writes them. Locks nothing. */
export const payloadsSql = (s: string): string =>
  `SELECT id::text, payload FROM ${s}.jobs WHERE id = ANY ($1::bigint[])`;
