import type { Adapter } from './contender';
import { type Behaviour, type Progress, type Stats, type WorkOptions, monotonicMs, tickOf } from './protocol';

/** Mean 5 ms: some handlers are done at once, some take twice as long, as with real calls. */
const WAIT_MOST_MS = 10;

/** The working side of an agent: runs a worker whose handler counts itself. */
export class Working {
  readonly starts: [n: number, atMs: number][] = [];
  private readonly counters = { started: 0, firstAt: 0, lastAt: 0 };
  private readonly startsByTick: number[] = [];
  private cpuUsAtFirst = 0;
  private worker: { stop(): Promise<unknown> } | undefined;

  constructor(
    private readonly adapter: Adapter,
    private readonly url: () => string,
  ) {}

  get progress(): Omit<Progress, 'added'> {
    return this.counters;
  }

  async start({ behaviour, keepStarts, ...options }: WorkOptions): Promise<void> {
    const { counters } = this;
    const act = ACTS[behaviour];
    // performance.now() is the cheaper of the two clocks and runs evenly with the other.
    const offset = monotonicMs() - performance.now();
    this.worker = await this.adapter.worker(this.url(), options, (n) => {
      const at = performance.now() + offset;
      if (counters.started++ === 0) {
        counters.firstAt = at;
        this.cpuUsAtFirst = cpuUs();
      }
      counters.lastAt = at;
      const tick = tickOf(at) - tickOf(counters.firstAt);
      this.startsByTick[tick] = (this.startsByTick[tick] ?? 0) + 1;
      if (keepStarts) this.starts.push([n, at]);
      return act();
    });
  }

  async stop(): Promise<void> {
    await this.worker?.stop();
    this.worker = undefined;
  }

  stats(): Omit<Stats, 'added'> {
    return {
      ...this.counters,
      cpuUs: cpuUs(),
      cpuUsAtFirst: this.cpuUsAtFirst,
      rssBytes: process.memoryUsage.rss(),
      startsByTick: Array.from(this.startsByTick, (count) => count ?? 0),
    };
  }

  async loops(loops: number, seconds: number): Promise<number> {
    let runs = 0;
    const beganAt = monotonicMs();
    const until = beganAt + seconds * 1000;
    const loop = async (): Promise<void> => {
      while (monotonicMs() < until) {
        await wait();
        runs++;
      }
    };
    await Promise.all(Array.from({ length: loops }, loop));
    return (runs * 1000) / (monotonicMs() - beganAt);
  }
}

const wait = (): Promise<void> => new Promise((resolve) => setTimeout(resolve, Math.random() * WAIT_MOST_MS));

const ACTS: Record<Behaviour, () => Promise<void> | undefined> = {
  nothing: () => undefined,
  wait,
  hold: () => new Promise(() => undefined),
};

function cpuUs(): number {
  const { user, system } = process.cpuUsage();
  return user + system;
}
