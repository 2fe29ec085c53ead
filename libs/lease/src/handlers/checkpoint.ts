import type { LeasedJob } from '../claim/leased-job';
import { SnoozeError } from '../errors';
import type { CheckpointFormat } from './handler.types';

/** How long a job with a checkpoint of a newer version waits for a worker that can read it. */
const NEWER_DELAY_MS = 10_000;

/**
 * The stored checkpoint in the format that this process's handler reads. One of an older version is upgraded; one of a newer version, in the
 * middle of a deploy, is left to a worker with newer code: the job is snoozed, which `maxSnoozes` bounds.
 */
export function checkpointFor(
  { id, checkpoint, checkpointVersion: stored }: LeasedJob,
  { version, upgrade }: CheckpointFormat,
): unknown {
  if (stored === version) return checkpoint;
  if (stored > version) throw new SnoozeError(NEWER_DELAY_MS);
  if (upgrade) return upgrade(checkpoint, stored);
  throw new Error(
    `The checkpoint of job ${id} has version ${stored} and the handler reads version ${version}: give its @JobHandler checkpoint.upgrade`,
  );
}
