import { LeaseModule } from '@leasehold/nestjs';
import { type DynamicModule, Module } from '@nestjs/common';
import { ScheduleModule } from '@nestjs/schedule';
import { CloseIndex } from '../documents/close-index.handler';
import { CONCURRENCY, IndexDocument } from '../documents/index-document.handler';
import { LEASE_SETTINGS } from '../lease-settings';
import type { WorkerConfig } from './messages';
import { EventReporter } from './event-reporter';
import { Pace } from './pace';

/** A process that runs jobs and nothing else. */
@Module({})
export class WorkerModule {
  static forRoot({ url, schema, name, paceMs }: WorkerConfig): DynamicModule {
    return {
      module: WorkerModule,
      imports: [
        ScheduleModule.forRoot(),
        LeaseModule.forRoot({
          ...LEASE_SETTINGS,
          role: 'worker',
          connection: { url },
          schema,
          workerName: name,
          concurrency: CONCURRENCY,
          // Nothing is claimed ahead, so that what a fault finds leased is what runs.
          buffer: { max: 0 },
          shutdown: { timeout: '5s', grace: '1s' },
        }),
      ],
      providers: [EventReporter, IndexDocument, CloseIndex, { provide: Pace, useValue: new Pace(paceMs) }],
    };
  }
}
