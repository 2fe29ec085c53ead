import type { JobState, JobStatus, JobsService } from '@leasehold/nestjs';
import { eventually, type EventuallyOptions } from './eventually';

/** Waits until a job is in a state, and returns what is known about it then. */
export function untilState<R = unknown>(
  jobs: JobsService,
  id: string,
  state: JobState,
  options: EventuallyOptions = {},
): Promise<JobStatus<unknown, R>> {
  return eventually(
    async () => {
      const job = await jobs.get(id);
      return job.state === state ? (job as JobStatus<unknown, R>) : undefined;
    },
    { what: `Job ${id} becoming ${state}`, state: () => jobs.get(id), ...options },
  );
}
