import type { Socket } from 'node:net';

interface Parcel {
  /** `undefined` is the end of the stream. */
  bytes: Buffer | undefined;
  dueAt: number;
}

/** One direction of a proxied connection: it can be held up and slowed down, and looks at what passes. */
export class ProxyPipe {
  delayMs = 0;
  private readonly parcels: Parcel[] = [];
  private timer: NodeJS.Timeout | undefined;
  private isFrozen = false;

  constructor(
    private readonly from: Socket,
    private readonly to: Socket,
    /** Sees each chunk as it comes, and returns what to pass on. */
    private readonly inspect: (chunk: Buffer) => Buffer | undefined,
  ) {
    from.on('data', (chunk: Buffer) => this.accept(this.inspect(chunk)));
    from.on('end', () => this.enqueue(undefined));
    to.on('drain', () => this.update());
  }

  get frozen(): boolean {
    return this.isFrozen;
  }

  /** While frozen nothing is read either, so the sender's own buffers fill up as behind a dead cable. */
  set frozen(frozen: boolean) {
    if (frozen === this.isFrozen) return;
    this.isFrozen = frozen;
    this.update();
  }

  destroy(): void {
    clearTimeout(this.timer);
    this.parcels.length = 0;
  }

  private accept(bytes: Buffer | undefined): void {
    if (bytes !== undefined && bytes.length > 0) this.enqueue(bytes);
  }

  private enqueue(bytes: Buffer | undefined): void {
    this.parcels.push({ bytes, dueAt: performance.now() + this.delayMs });
    this.update();
  }

  private update(): void {
    clearTimeout(this.timer);
    if (!this.isFrozen) this.passOn();
    if (this.isFrozen || this.to.writableNeedDrain) this.from.pause();
    else this.from.resume();
  }

  private passOn(): void {
    for (let next = this.parcels[0]; next !== undefined; next = this.parcels[0]) {
      const wait = next.dueAt - performance.now();
      if (wait > 0) {
        this.timer = setTimeout(() => this.update(), Math.ceil(wait));
        return;
      }
      this.parcels.shift();
      if (next.bytes === undefined) this.to.end();
      else this.to.write(next.bytes);
    }
  }
}
