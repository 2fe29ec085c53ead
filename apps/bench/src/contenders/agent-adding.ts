import { randomBytes } from 'node:crypto';
import { setTimeout as sleep } from 'node:timers/promises';
import { percentile } from '../measure/statistics';
import type { Adapter, HeadKind, Payload, Producer } from './contender';
import { type AddResult, type FillOptions, type OpenLoopResult, monotonicMs } from './protocol';

const FILL_CALLERS = 2;
const HEAD_BATCH = 1000;
/** A stream that the store cannot follow must not fill the memory with calls that wait. */
const STREAM_CALLS = 4;

/** The adding side of an agent. */
export class Adding {
  /** Jobs that a stream has added. */
  streamed = 0;
  private producer: Producer | undefined;
  private stream: { stopping: boolean; ended: Promise<unknown> } | undefined;

  constructor(
    private readonly adapter: Adapter,
    private readonly url: () => string,
  ) {}

  async start(callers: number): Promise<void> {
    this.producer = await this.adapter.producer(this.url(), callers);
  }

  async stop(): Promise<void> {
    await this.open.close();
    this.producer = undefined;
  }

  async fill({ count, batch, payloadBytes, asBatches }: FillOptions): Promise<void> {
    const make = payloads(payloadBytes);
    const { open } = this;
    const add = asBatches ? open.asBatch?.bind(open) : open.bulk.bind(open);
    if (!add) throw new Error('it has no batches');
    await inLots(count, batch, (from, size) => add(make(from, size)));
  }

  async fillHead(kind: HeadKind, count: number): Promise<void> {
    const make = payloads(0);
    await inLots(count, HEAD_BATCH, (from, size) => this.open.head(kind, make(from, size)));
  }

  async addFor(callers: number, seconds: number): Promise<AddResult> {
    let n = 0;
    return timed(seconds, callers, 1, () => this.open.one({ n: n++ }));
  }

  async bulkFor(batch: number, seconds: number): Promise<AddResult> {
    const make = payloads(0);
    let n = 0;
    return timed(seconds, 1, batch, () => this.open.bulk(make((n += batch), batch)));
  }

  async openLoop(rate: number, seconds: number, from: number): Promise<OpenLoopResult> {
    const count = Math.round(rate * seconds);
    const calledAt: number[] = [];
    const storedAt: number[] = [];
    const calls: Promise<void>[] = [];
    const beganAt = monotonicMs();
    for (let i = 0; i < count; i++) {
      const early = beganAt + (i * 1000) / rate - monotonicMs();
      if (early > 0.5) await sleep(early);
      calledAt[i] = monotonicMs();
      calls.push(
        this.open.one({ n: from + i }).then(() => {
          storedAt[i] = monotonicMs();
        }),
      );
    }
    await Promise.all(calls);
    return { calledAt, storedAt };
  }

  startStream(rate: number, batch: number): void {
    const make = payloads(0);
    const stream = { stopping: false, ended: Promise.resolve() as Promise<unknown> };
    const beganAt = monotonicMs();
    const from = this.streamed;
    let asked = 0;
    const caller = async (): Promise<void> => {
      while (!stream.stopping) {
        if (asked + batch > ((monotonicMs() - beganAt) / 1000) * rate) {
          await sleep(2);
          continue;
        }
        const n = from + asked;
        asked += batch;
        await this.open.bulk(make(n, batch));
        this.streamed += batch;
      }
    };
    stream.ended = Promise.all(Array.from({ length: STREAM_CALLS }, caller));
    stream.ended.catch(() => undefined);
    this.stream = stream;
  }

  async stopStream(): Promise<void> {
    if (!this.stream) return;
    this.stream.stopping = true;
    await this.stream.ended;
    this.stream = undefined;
  }

  private get open(): Producer {
    if (!this.producer) throw new Error('the producer was not started');
    return this.producer;
  }
}

/** Base64 of random bytes does not compress, so every queue stores what it was given. */
function payloads(bytes: number): (from: number, size: number) => Payload[] {
  const pad =
    bytes === 0
      ? {}
      : {
          pad: randomBytes(Math.ceil((bytes * 3) / 4))
            .toString('base64')
            .slice(0, bytes),
        };
  return (from, size) => Array.from({ length: size }, (_, i) => ({ n: from + i, ...pad }));
}

async function inLots(
  count: number,
  batch: number,
  add: (from: number, size: number) => Promise<unknown>,
): Promise<void> {
  let next = 0;
  const caller = async (): Promise<void> => {
    while (next < count) {
      const from = next;
      next += batch;
      await add(from, Math.min(batch, count - from));
    }
  };
  await Promise.all(Array.from({ length: FILL_CALLERS }, caller));
}

/** So many callers, each of which calls again as soon as it has its answer, until the time is up. */
async function timed(
  seconds: number,
  callers: number,
  jobsOfCall: number,
  call: () => Promise<unknown>,
): Promise<AddResult> {
  const durations: number[] = [];
  const cpu = process.cpuUsage();
  const beganAt = monotonicMs();
  const until = beganAt + seconds * 1000;
  const caller = async (): Promise<void> => {
    for (let at = monotonicMs(); at < until;) {
      await call();
      const now = monotonicMs();
      durations.push(now - at);
      at = now;
    }
  };
  await Promise.all(Array.from({ length: callers }, caller));
  const elapsed = (monotonicMs() - beganAt) / 1000;
  const { user, system } = process.cpuUsage(cpu);
  return {
    jobs: durations.length * jobsOfCall,
    seconds: elapsed,
    p50: percentile(durations, 0.5),
    p99: percentile(durations, 0.99),
    cpuUs: user + system,
  };
}
