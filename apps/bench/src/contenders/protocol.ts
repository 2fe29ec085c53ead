import type { About, HeadKind, WorkerOptions } from './contender';

/** What the parent can tell an agent to do, and what it answers. Times are milliseconds of {@link monotonicMs}. */
export interface Commands {
  describe: { args: undefined; result: About };
  /** The store that all later commands mean. */
  target: { args: { url: string }; result: void };
  setup: { args: undefined; result: void };
  startProducer: { args: { callers: number }; result: void };
  stopProducer: { args: undefined; result: void };
  fill: { args: FillOptions; result: void };
  fillHead: { args: { kind: HeadKind; count: number }; result: void };
  /** Adds one by one, by so many callers at once. */
  addFor: { args: { callers: number; seconds: number }; result: AddResult };
  /** Adds lots of `batch`, one after the other. */
  bulkFor: { args: { batch: number; seconds: number }; result: AddResult };
  /** Adds one by one at a fixed rate, whatever has become of the ones before; numbers from `from`. */
  openLoop: { args: { rate: number; seconds: number; from: number }; result: OpenLoopResult };
  /** Adds lots at a fixed rate until stopped; the progress says how many were added. */
  startStream: { args: { rate: number; batch: number }; result: void };
  stopStream: { args: undefined; result: void };
  remaining: { args: undefined; result: number };
  startWorker: { args: WorkOptions; result: void };
  stopWorker: { args: undefined; result: void };
  stats: { args: undefined; result: Stats };
  /** Job number and time of each start, if they were to be kept. */
  starts: { args: undefined; result: [n: number, atMs: number][] };
  /** Runs the handler of `work5` in so many loops, with no queue at all. @returns runs per second */
  loops: { args: { loops: number; seconds: number }; result: number };
}

export type CommandName = keyof Commands;

export interface FillOptions {
  count: number;
  /** Jobs of one call. */
  batch: number;
  payloadBytes: number;
  /** Each call makes a batch with one aggregated status. */
  asBatches?: boolean;
}

export interface WorkOptions extends WorkerOptions {
  behaviour: Behaviour;
  keepStarts: boolean;
}

/** What a handler does: nothing, wait 0 to 10 ms, or wait for the process to end. */
export type Behaviour = 'nothing' | 'wait' | 'hold';

export interface AddResult {
  jobs: number;
  seconds: number;
  /** Duration of one call, ms. */
  p50: number;
  p99: number;
  cpuUs: number;
}

/** By job, in the order of the calls. */
export interface OpenLoopResult {
  calledAt: number[];
  storedAt: number[];
}

export interface Progress {
  /** Handlers started. */
  started: number;
  firstAt: number;
  lastAt: number;
  /** Jobs added by a stream. */
  added: number;
}

export interface Stats extends Progress {
  /** CPU of this process so far, and when the first handler started. */
  cpuUs: number;
  cpuUsAtFirst: number;
  rssBytes: number;
  /** Handlers started, by tick of {@link TICK_MS} since the one in which the first started. */
  startsByTick: number[];
}

export const TICK_MS = 10;

/** The tick of a moment; the same in all processes. */
export const tickOf = (atMs: number): number => Math.floor(atMs / TICK_MS);

export interface Request {
  id: number;
  command: CommandName;
  args: unknown;
}

export type Reply =
  { id: number; ok: true; result: unknown } | { id: number; ok: false; error: string } | { progress: Progress };

/** One clock for all processes of the machine. */
export const monotonicMs = (): number => Number(process.hrtime.bigint()) / 1e6;
