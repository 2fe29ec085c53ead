import { escapeIdentifier } from 'pg';
import type { DocumentIndex } from '../documents/index-document';
import type { RunDatabase } from '../run/database';

/** One file of the report: its index, or why there is none. */
export interface ReportedDocument {
  path: string;
  worker: string;
  index: DocumentIndex | null;
  reason: string | null;
}

const PAGE = 5000;

/** All jobs' results, in pages, in the order of their ids. */
export async function* readDocuments({ query, schema }: RunDatabase): AsyncGenerator<ReportedDocument> {
  const s = escapeIdentifier(schema);
  for (let after = '0'; ;) {
    const rows = await query<ReportedDocument & { id: string }>(
      `SELECT j.id::text AS id, j.payload->>'path' AS path, regexp_replace(coalesce(f.worker_id, '-'), '-[0-9]+-[0-9a-f]+$', '') AS worker,
         f.result AS index, f.reason
       FROM ${s}.jobs j JOIN ${s}.finished f ON f.job_id = j.id WHERE j.id > $1 AND j.batch_id IS NOT NULL ORDER BY j.id LIMIT ${PAGE}`,
      [after],
    );
    for (const { path, worker, index, reason } of rows) yield { path, worker, index, reason };
    const last = rows.at(-1);
    if (!last || rows.length < PAGE) return;
    after = last.id;
  }
}
