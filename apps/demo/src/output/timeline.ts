import { styleText } from 'node:util';
import { MultiBar, type SingleBar } from 'cli-progress';
import { digits } from './format';

export type Mood = 'plain' | 'good' | 'bad' | 'cold' | 'dim';

const COLOURS = { good: 'green', bad: 'red', cold: 'cyan', dim: 'gray' } as const;

/** What the watcher sees: lines with the time since the start, and below them, on a terminal, a progress bar. */
export class Timeline {
  private readonly began = performance.now();
  private bars: MultiBar | undefined;
  private bar: SingleBar | undefined;
  private quarter = 0;

  constructor(
    private readonly stream: NodeJS.WriteStream,
    /** No bar, whatever the stream is. */
    private readonly quiet: boolean,
  ) {}

  /** A line without a time. */
  say(text: string): void {
    this.write(text);
  }

  /** Something that happened now. */
  tell(text: string, mood: Mood = 'plain'): void {
    const seconds = ((performance.now() - this.began) / 1000).toFixed(1).padStart(6);
    this.write(`${this.paint(`${seconds} s`, 'dim')}  ${this.paint(text, mood)}`);
  }

  startProgress(total: number): void {
    if (this.quiet || !this.stream.isTTY) return;
    this.bars = new MultiBar({
      format: '          {bar} {percentage} %  {value} of {total} files, {running} running, {failed} unreadable',
      barCompleteChar: '█',
      barIncompleteChar: '░',
      barsize: 30,
      hideCursor: true,
      gracefulExit: false,
      linewrap: true,
      stream: this.stream,
    });
    this.bar = this.bars.create(total, 0, { running: 0, failed: 0 });
  }

  progress(done: number, total: number, running: number, failed: number): void {
    if (this.bar) return this.bar.update(done, { running, failed });
    const quarter = Math.floor((done / total) * 4);
    if (quarter > this.quarter) this.tell(`${digits(done)} of ${digits(total)} files indexed`, 'dim');
    this.quarter = Math.max(this.quarter, quarter);
  }

  /** Leaves the bar as it is and gives the cursor back. Idempotent. */
  stopProgress(): void {
    this.bars?.stop();
    this.bars = undefined;
    this.bar = undefined;
  }

  private write(text: string): void {
    if (this.bars) this.bars.log(`${text}\n`);
    else this.stream.write(`${text}\n`);
  }

  private paint(text: string, mood: Mood): string {
    const plain = mood === 'plain' || !this.stream.isTTY || process.env.NO_COLOR !== undefined;
    return plain ? text : styleText(COLOURS[mood], text);
  }
}
