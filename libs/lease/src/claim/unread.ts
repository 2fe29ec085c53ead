import type { Database } from '../storage/database';
import { checkpointsSql, payloadsSql } from './exchange.sql';
import type { Claimed } from './leased-job';
import { list } from './step-values';

/** Reads what a claim left out of its text: long payloads, and checkpoints. @returns keys of jobs that are not there to be read */
export async function readUnread(database: Database, { large, saved }: Claimed): Promise<Set<string>> {
  const s = database.schema.quoted;
  const [payloads, checkpoints] = await Promise.all([
    large.length === 0
      ? []
      : database.query<{ id: string; payload: unknown }>(payloadsSql(s), [list(large.map(({ id }) => id))], {
          name: 'leasehold_payloads',
        }),
    saved.length === 0
      ? []
      : database.query<{ id: string; version: number; checkpoint: unknown }>(
          checkpointsSql(s),
          [list(saved.map(({ id }) => id))],
          { name: 'leasehold_checkpoints' },
        ),
  ]);
  const payloadOf = new Map(payloads.map(({ id, payload }) => [id, payload]));
  for (const job of large) job.payload = payloadOf.get(job.id);
  const checkpointOf = new Map(checkpoints.map((row) => [row.id, row]));
  for (const job of saved) {
    const found = checkpointOf.get(job.id);
    if (found) [job.checkpoint, job.checkpointVersion] = [found.checkpoint, found.version];
  }
  return new Set(large.filter(({ id }) => !payloadOf.has(id)).map(({ key }) => key));
}
