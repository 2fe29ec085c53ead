import { LeaseModule } from '@leasehold/nestjs';
import { LeaseAdminModule } from '@leasehold/nestjs-admin';
import { type DynamicModule, Module } from '@nestjs/common';
import { LEASE_SETTINGS } from '../lease-settings';

/** The process that enqueues and answers, and runs no jobs. It also brings the schema up to date. */
@Module({})
export class ApiModule {
  static forRoot(url: string, schema: string): DynamicModule {
    return {
      module: ApiModule,
      imports: [
        LeaseModule.forRoot({ ...LEASE_SETTINGS, role: 'producer', connection: { url }, schema, migrate: true }),
        // No guard: it listens on 127.0.0.1 only, for the length of a demo.
        LeaseAdminModule.forRoot(),
      ],
    };
  }
}
