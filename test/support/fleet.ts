import type { LeaseEvent, LeaseOptions } from '@leasehold/nestjs';
import { type TestProcess, fixture, startProcess } from './processes';

export interface WorkerProcess {
  id: string;
  process: TestProcess;
  /** The next message of this job: it started. */
  started(jobId: string, timeoutMs?: number): Promise<{ started: string; token: string; attempt: number }>;
  interrupted(jobId: string, timeoutMs?: number): Promise<{ interrupted: string; reason: string }>;
  event<T extends LeaseEvent['type']>(type: T, timeoutMs?: number): Promise<LeaseEvent & { type: T }>;
  /** Lets a job with `gate` go on. */
  go(jobId: string): void;
}

/** A real worker process (test/fixtures/worker.ts) on this database. */
export async function startWorkerProcess(
  url: string,
  options: Partial<LeaseOptions> = {},
  env: Record<string, string> = {},
): Promise<WorkerProcess> {
  const process = startProcess(fixture('worker'), {
    env: { LEASE_URL: url, LEASE_OPTIONS: JSON.stringify(options), ...env },
  });
  const message = async <T>(fits: (message: Record<string, unknown>) => boolean, timeoutMs?: number): Promise<T> => {
    const found: unknown = await process.next((value) => fits(value), timeoutMs);
    return found as T;
  };
  const first = await message<{ ready?: string; failed?: string }>(
    ({ ready, failed }) => ready !== undefined || failed !== undefined,
    30_000,
  );
  if (first.ready === undefined) throw new Error(`The worker did not start: ${first.failed}`);
  return {
    id: first.ready,
    process,
    started: (jobId, timeoutMs) => message(({ started }) => started === jobId, timeoutMs),
    interrupted: (jobId, timeoutMs) => message(({ interrupted }) => interrupted === jobId, timeoutMs),
    event: async (type, timeoutMs) =>
      (
        await message<{ event: LeaseEvent & { type: typeof type } }>(
          ({ event }) => (event as LeaseEvent | undefined)?.type === type,
          timeoutMs,
        )
      ).event,
    go: (jobId) => process.send({ go: jobId }),
  };
}
