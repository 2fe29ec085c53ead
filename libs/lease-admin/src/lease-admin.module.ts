import { JobsService, LeaderService, WorkersService, getLeaseToken } from '@leasehold/nestjs';
import { type CanActivate, type DynamicModule, Module, type ModuleMetadata, type Type } from '@nestjs/common';
import { ADMIN_JOBS, ADMIN_LEADER, ADMIN_WORKERS, adminController } from './lease-admin.controller';

export interface LeaseAdminOptions extends Pick<ModuleMetadata, 'imports'> {
  /** Where the routes are, below a global prefix if the application has one. Default 'leasehold'. */
  path?: string;
  /** Name of the lease instance that is shown. Default 'default'. */
  instance?: string;
  /** Guards before every route. Default none: then whoever reaches the port reads payloads, results and errors. */
  guards?: (CanActivate | Type<CanActivate>)[];
}

/** Read-only REST views of jobs, workers and the leader; import it beside LeaseModule, with a guard of your own before it. */
@Module({})
export class LeaseAdminModule {
  static forRoot({
    path = 'leasehold',
    instance = 'default',
    guards = [],
    imports = [],
  }: LeaseAdminOptions = {}): DynamicModule {
    const service = (provide: symbol, type: Type<unknown>) => ({ provide, useExisting: getLeaseToken(type, instance) });
    return {
      module: LeaseAdminModule,
      imports,
      controllers: [adminController(path, guards)],
      providers: [
        service(ADMIN_JOBS, JobsService),
        service(ADMIN_WORKERS, WorkersService),
        service(ADMIN_LEADER, LeaderService),
      ],
    };
  }
}
