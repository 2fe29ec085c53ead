import type { JobStatus, JobsService } from '@leasehold/nestjs';
import type { Timeline } from '../output/timeline';
import type { RunDatabase } from '../run/database';
import type { Fleet } from '../run/fleet';
import type { Progress } from '../run/progress';
import { until } from '../run/until';
import type { WorkerProcess } from '../run/worker-process';

/** What a fault works on. */
export interface FaultContext {
  fleet: Fleet;
  jobs: JobsService;
  database: RunDatabase;
  timeline: Timeline;
  progress: Progress;
  signal: AbortSignal;
  /** The file of a job. */
  fileOf(jobId: string): string;
}

/** The jobs that a worker has leased now, by the database. */
export async function heldBy({ jobs }: FaultContext, workerId: string): Promise<JobStatus[]> {
  const page = await jobs.find({ state: 'running', limit: 1000 });
  return page.jobs.filter((job) => job.workerId === workerId);
}

/**
 * Waits for a worker with jobs in flight: the one with the most, of those the leader.
 * @returns undefined when all jobs have ended meanwhile
 */
export async function findBusy(context: FaultContext): Promise<WorkerProcess | undefined> {
  const { jobs, fleet, progress, signal } = context;
  const found = await until(
    'A worker with jobs in flight',
    async () => {
      if (progress.done) return { worker: undefined };
      const { jobs: running } = await jobs.find({ state: 'running', limit: 1000 });
      const load = (worker: WorkerProcess): number => {
        const own = running.filter((job) => job.workerId === worker.workerId).length;
        return own === 0 ? 0 : own + (fleet.isLeader(worker) ? 0.5 : 0);
      };
      const [worker] = fleet.up.sort((a, b) => load(b) - load(a));
      return worker && load(worker) > 0 && { worker };
    },
    { signal, everyMs: 50 },
  );
  return found.worker;
}
