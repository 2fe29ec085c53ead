/** What one run of one case with one contender has brought. */
export interface Measurement {
  /** In the case's unit. */
  value: number;
  /** Of log, per job. */
  walBytes?: number;
  /** Rows updated or deleted, per job. */
  deadTuples?: number;
  /** Per job, on the server and in our processes. */
  cpuUs?: { server?: number; node?: number };
  /** Further figures, by name. */
  detail?: Record<string, number>;
}

/** The server's counters at one moment. */
export interface ServerReading {
  cpuUs: number | undefined;
  walBytes: number | undefined;
}

/** What lies between two readings, per job. */
export function costs(
  before: ServerReading,
  after: ServerReading,
  jobs: number,
  nodeUs?: number,
): Pick<Measurement, 'walBytes' | 'cpuUs'> {
  const perJob = (from: number | undefined, to: number | undefined): number | undefined =>
    from === undefined || to === undefined ? undefined : (to - from) / jobs;
  const walBytes = perJob(before.walBytes, after.walBytes);
  const server = perJob(before.cpuUs, after.cpuUs);
  return {
    ...(walBytes === undefined ? {} : { walBytes }),
    cpuUs: {
      ...(server === undefined ? {} : { server }),
      ...(nodeUs === undefined ? {} : { node: nodeUs / jobs }),
    },
  };
}
