import type { ClientConfig } from 'pg';
import type { Attested } from '../claim/held-leases';

/** Everything the beat needs to know about its worker; must survive being cloned to a thread. */
export interface BeatConfig {
  workerId: string;
  connection: ClientConfig;
  schema: string;
  lockSpace: number;
  lockNo: number;
  storeKey: string;
  store: 'shared' | 'exclusive';
  ttlMs: number;
  beatMs: number;
  maxBlockedMs: number;
  queryTimeoutMs: number;
  memory: SharedArrayBuffer;
}

export type Pair = [jobId: string, token: string];

export interface AttestResult {
  gone: Pair[];
  stops: [jobId: string, token: string, request: 'cancel' | 'pause'][];
  unknown: Pair[];
}

/** From the beat to the service. */
export type FromBeat =
  /** The row was renewed; `no` numbers the beat, `sentAt` is monotonic ms. */
  | { type: 'beat'; no: number; sentAt: number }
  | { type: 'attested'; no: number; workerId: string; result: AttestResult }
  /** The worker's row is no longer live: it was declared dead. */
  | { type: 'dead' }
  /** The store lock is somebody else's. */
  | { type: 'not-exclusive' }
  /** Session locks do not hold on this connection. */
  | { type: 'pooled' }
  | { type: 'trouble'; message: string };

/** From the service to the beat. */
export type ToBeat = { type: 'held'; no: number; attested: Attested } | { type: 'beat-now' } | { type: 'stop' };

const LOOP_ALIVE = 0;
const LAST_GOOD = 1;
const IN_FLIGHT = 2;
const STUCK = 3;

/** Numbers that both threads see without a message: the main thread's event loop may be blocked just when they matter. Times in monotonic ms. */
export class BeatMemory {
  private readonly cells: BigInt64Array;

  constructor(readonly buffer = new SharedArrayBuffer(4 * 8)) {
    this.cells = new BigInt64Array(buffer);
  }

  /** When the main thread's event loop last turned. */
  get loopAliveAt(): number {
    return this.read(LOOP_ALIVE) / 1000;
  }
  set loopAliveAt(ms: number) {
    this.write(LOOP_ALIVE, ms * 1000);
  }

  /** When the last beat that succeeded was *sent*. */
  get lastGoodAt(): number {
    return this.read(LAST_GOOD) / 1000;
  }
  set lastGoodAt(ms: number) {
    this.write(LAST_GOOD, ms * 1000);
  }

  get inFlight(): number {
    return this.read(IN_FLIGHT);
  }
  set inFlight(count: number) {
    this.write(IN_FLIGHT, count);
  }

  get stuck(): number {
    return this.read(STUCK);
  }
  set stuck(count: number) {
    this.write(STUCK, count);
  }

  private read(cell: number): number {
    return Number(Atomics.load(this.cells, cell));
  }

  private write(cell: number, value: number): void {
    Atomics.store(this.cells, cell, BigInt(Math.round(value)));
  }
}
