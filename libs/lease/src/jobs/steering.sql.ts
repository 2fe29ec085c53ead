import type { JobState } from './job.types';
import { STATE_SOURCE } from './jobs.sql';

/** One command for some jobs; see `steer_v1`. Locks their state rows in the order of their ids, then their keys. */
export const steerSql = (s: string): string => `
  SELECT job::text, answer, state, now_in AS "nowIn", token::text, worker, holder::text, queue, kind, batch::text
  FROM ${s}.steer_v1($1, $2::bigint[], $3, $4)`;

/**
 * Ids of jobs in some states that fit a filter, the oldest first, from one after `$1` on, at most `$5`. Reads those states' own tables,
 * not all jobs. Locks nothing.
 */
export const idsSql = (s: string, states: readonly JobState[]): string => `
  SELECT x.job_id::text AS id FROM (${states
    .map((state) => {
      const source = STATE_SOURCE[state];
      return `(SELECT job_id FROM ${s}.${source} ${source.includes('WHERE') ? 'AND' : 'WHERE'} job_id > $1::bigint
      AND ($2::text IS NULL OR kind = $2) AND ($3::text IS NULL OR queue = $3)
      AND ($6::bigint IS NULL OR (batch_id = $6 AND batch_id > 0))
      AND ($4::text IS NULL OR EXISTS (SELECT FROM ${s}.jobs j WHERE j.id = job_id AND $4 = ANY (j.tags))) ORDER BY job_id LIMIT $5)`;
    })
    .join(' UNION ALL ')}) x
  ORDER BY x.job_id LIMIT $5`;

/** How many that are, counted to `$5`. */
export const countIdsSql = (s: string, states: readonly JobState[]): string =>
  `SELECT count(*)::int AS count FROM (${idsSql(s, states)}) x`;
