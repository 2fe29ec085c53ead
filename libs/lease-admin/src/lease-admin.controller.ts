import {
  type JobPage,
  type JobState,
  type JobStatus,
  JobsService,
  type LeaderInfo,
  LeaderService,
  type WorkerInfo,
  WorkersService,
} from '@leasehold/nestjs';
import {
  type CanActivate,
  Controller,
  Get,
  Inject,
  Param,
  Query,
  type Type,
  UseFilters,
  UseGuards,
} from '@nestjs/common';
import { LeaseErrorFilter } from './lease-error.filter';
import { ListJobsQuery, ListWorkersQuery } from './list-queries';
import { queryPipe } from './query-pipe';

/** The services of the lease instance that is shown, under names of this module's own. */
export const ADMIN_JOBS = Symbol('leasehold-admin:jobs');
export const ADMIN_WORKERS = Symbol('leasehold-admin:workers');
export const ADMIN_LEADER = Symbol('leasehold-admin:leader');

/** Everything here reads; nothing is changed. */
abstract class LeaseAdminRoutes {
  constructor(
    @Inject(ADMIN_JOBS) private readonly jobs: JobsService,
    @Inject(ADMIN_WORKERS) private readonly workersService: WorkersService,
    @Inject(ADMIN_LEADER) private readonly leaderService: LeaderService,
  ) {}

  @Get('jobs')
  find(@Query(queryPipe()) query: ListJobsQuery): Promise<JobPage> {
    return this.jobs.find(query);
  }

  @Get('jobs/counts')
  counts(): Promise<Record<JobState, number>> {
    return this.jobs.counts();
  }

  @Get('jobs/:id')
  get(@Param('id') id: string): Promise<JobStatus> {
    return this.jobs.get(id);
  }

  @Get('workers')
  async workers(@Query(queryPipe()) { active }: ListWorkersQuery): Promise<{ workers: WorkerInfo[] }> {
    const workers = await this.workersService.list({ activeOnly: active === 'true' });
    return { workers: active === 'false' ? workers.filter((worker) => !worker.active) : workers };
  }

  @Get('leader')
  leader(): Promise<LeaderInfo> {
    return this.leaderService.current();
  }

  @Get('kinds/unhandled')
  async unhandled(): Promise<{ kinds: string[] }> {
    return { kinds: await this.jobs.unhandledKinds() };
  }
}

/** A controller class of its own for each path, so that two instances can be shown side by side. */
export function adminController(path: string, guards: (CanActivate | Type<CanActivate>)[]): Type<LeaseAdminRoutes> {
  @Controller(path)
  @UseGuards(...guards)
  @UseFilters(LeaseErrorFilter)
  class LeaseAdminController extends LeaseAdminRoutes {}
  return LeaseAdminController;
}
