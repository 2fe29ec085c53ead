import { type LeaseEvent, LeaseEvents } from '@leasehold/nestjs';
import { Injectable } from '@nestjs/common';
import { tellParent } from './tell-parent';

const COLLECT_MS = 20;

/** Tells the parent what happens here, a batch at a time. Made with the application, so it misses no event of its start. */
@Injectable()
export class EventReporter {
  private batch: LeaseEvent[] = [];
  private timer: NodeJS.Timeout | undefined;

  constructor({ stream }: LeaseEvents) {
    stream.subscribe({
      next: (event) => {
        this.batch.push(event);
        this.timer ??= setTimeout(() => this.flush(), COLLECT_MS);
      },
      complete: () => this.flush(),
    });
  }

  private flush(): void {
    clearTimeout(this.timer);
    this.timer = undefined;
    if (this.batch.length > 0) tellParent({ type: 'events', events: this.batch });
    this.batch = [];
  }
}
