import { Logger } from '@nestjs/common';
import type { ModulesContainer } from '@nestjs/core';
import { errorText } from '../storage/sql-errors';
import { Enqueued } from './enqueued';
import { type LeaseParts, leaseParts } from './lease-parts';
import type { Send } from './test-clock';
import { TestWorker } from './test-worker';
import { TestingDatabase } from './testing-database';

/** What the testing kit of one lease instance consists of. */
export class Kit {
  readonly worker: TestWorker;
  readonly enqueued: Enqueued;
  /** Ends the test's transaction, while one is in force. */
  leaveTransaction: () => Promise<void> = () => Promise.resolve();
  /** Whether the time was changed, and is to be put right in the end. */
  timeMoved = false;
  private readonly logger = new Logger('Leasehold');

  constructor(
    readonly parts: LeaseParts,
    readonly database: TestingDatabase,
  ) {
    this.worker = new TestWorker(parts, database);
    this.enqueued = new Enqueued(parts, database);
    // A worker hears of it by NOTIFY or its next beat.
    parts.events.on('job.steered', ({ jobId, command, from }) => {
      if (from === 'running') this.worker.steered(jobId, command);
    });
    database.beforeClose(() => this.close());
  }

  readonly send: Send = (text, values) => this.database.query(text, values);
  readonly outside: Send = (text, values) => this.database.outside(text, values);

  private async close(): Promise<void> {
    try {
      await this.leaveTransaction();
      const stuck = await this.worker.stop(this.parts.options.shutdown.graceMs);
      if (stuck.length > 0) {
        this.logger.warn(`Handlers of jobs ${stuck.join(', ')} still run after the application under test was closed`);
      }
      if (this.timeMoved) await this.database.clock.reset(this.send);
    } catch (error) {
      this.logger.warn(`The testing kit could not sign off: ${errorText(error)}`);
    }
  }
}

const kits = new WeakMap<object, Kit>();

/** The kit of an application's lease instance: one, however often it is asked for. @throws LeaseSetupError if there is no such instance */
export function kitOf(modules: ModulesContainer, name: string): Kit {
  const parts = leaseParts(modules, name);
  const known = kits.get(parts.database);
  if (known) return known;
  const kit = new Kit(parts, TestingDatabase.adopt(parts.database, parts.options.connection.queryTimeoutMs));
  kits.set(parts.database, kit);
  return kit;
}
