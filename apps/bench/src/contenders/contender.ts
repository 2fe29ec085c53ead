/** What a job queue must be able to do to be measured here. Implemented for ours in TypeScript, for the peers in `apps/bench/peers`. */

export const PEERS = ['graphile', 'pgboss', 'bullmq', 'bullpg'] as const;
export type PeerName = (typeof PEERS)[number];
export const CONTENDERS = ['ours', ...PEERS] as const;
export type ContenderName = (typeof CONTENDERS)[number];

/** Where a contender keeps its jobs. */
export const STORES: Record<ContenderName, 'postgres' | 'redis'> = {
  ours: 'postgres',
  graphile: 'postgres',
  pgboss: 'postgres',
  bullmq: 'redis',
  bullpg: 'postgres',
};

/** What the worker is tuned for, where a queue has more than one sensible setting. Ours has one: its defaults. */
export type Mode =
  /** Many jobs that do nothing. */
  | 'throughput'
  /** Handlers that wait, 200 at once. */
  | 'async'
  /** Payloads of 100 KB. */
  | 'large'
  /** Few jobs, which should start at once. */
  | 'latency';

/** Jobs that stand in front of those to be run, and cannot be run themselves. */
export type HeadKind =
  /** Of a kind that no worker handles. */
  | 'unhandled'
  /** In a queue that is paused. */
  | 'paused'
  /** Due in a year. */
  | 'future';

export interface Payload {
  /** The job's number in this trial. */
  n: number;
  pad?: string;
}

/** Called by a handler first of all, with the job's number; a promise is to be awaited. */
export type OnJob = (n: number) => Promise<void> | undefined;

export interface Producer {
  /** Resolves when the job is stored. */
  one(payload: Payload): Promise<unknown>;
  bulk(payloads: Payload[]): Promise<unknown>;
  /** Stores them as one batch with one aggregated status; only where there is such a thing. */
  asBatch?(payloads: Payload[]): Promise<unknown>;
  /** Stores jobs that cannot run; only for the kinds of head that the contender knows. */
  head(kind: HeadKind, payloads: Payload[]): Promise<unknown>;
  close(): Promise<unknown>;
}

export interface WorkerOptions {
  /** Handlers at once. Ours takes it in every mode, the peers where their best setting does not say otherwise. */
  concurrency: number;
  mode: Mode;
}

export interface About {
  title: string;
  /** The npm package whose version counts. */
  package: string;
  /** Settings as they were measured, one line each. */
  settings: string[];
  /** What the queue promises that others do not, or does not promise. */
  contract: string[];
  /** Limits of the recovery from a lost worker at default settings, out of documentation or source. */
  recovery?: { seconds: number; source: string };
}

export interface Adapter {
  about: About;
  /** Makes an empty store ready. */
  setup(url: string): Promise<void>;
  producer(url: string, callers: number): Promise<Producer>;
  /** Resolves when it works. */
  worker(url: string, options: WorkerOptions, onJob: OnJob): Promise<{ stop(): Promise<unknown> }>;
  /** Jobs that can run and have not ended. */
  remaining(url: string): Promise<number>;
}
