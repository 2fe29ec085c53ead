import type { Logger } from '@nestjs/common';
import { monotonicMs } from '../storage/delays';

/** During an outage every loop has the same thing to say: one line a topic per interval, with a count of those left out. */
export class ThrottledLog {
  private readonly topics = new Map<string, { at: number; dropped: number }>();

  constructor(
    private readonly logger: Logger,
    private readonly everyMs = 10_000,
  ) {}

  warn(topic: string, message: string): void {
    const now = monotonicMs();
    const last = this.topics.get(topic);
    if (last && now - last.at < this.everyMs) {
      last.dropped++;
      return;
    }
    this.topics.set(topic, { at: now, dropped: 0 });
    this.logger.warn(last && last.dropped > 0 ? `${message} (and ${last.dropped} more like it)` : message);
  }
}
