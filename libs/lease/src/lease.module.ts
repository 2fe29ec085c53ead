import {
  type DynamicModule,
  type ModuleMetadata,
  type OnApplicationBootstrap,
  type OnApplicationShutdown,
  type OnModuleDestroy,
  type OnModuleInit,
  type Provider,
  type Type,
  Module,
} from '@nestjs/common';
import { DiscoveryModule, ModuleRef, ModulesContainer } from '@nestjs/core';
import { SchedulerRegistry } from '@nestjs/schedule';
import { BatchFollowUps } from './batches/batch-follow-ups';
import { BatchReader } from './batches/batch-reader';
import { BatchSweep } from './batches/batch-sweep';
import { BatchSteering } from './batches/batch-steering';
import { BatchWriter } from './batches/batch-writer';
import { BatchesService } from './batches/batches.service';
import { ClaimService } from './claim/claim.service';
import { Dispatcher } from './claim/dispatcher';
import { Exchange } from './claim/exchange';
import { HeldLeases } from './claim/held-leases';
import { Lanes } from './claim/lanes';
import { WakeUp } from './claim/wake-up';
import { InvalidOptionError, LeaseSetupError } from './errors';
import { LeaseEvents } from './events/lease-events';
import { HandlerRegistry } from './handlers/handler-registry';
import { handlerMetadata, handlerTypeOf } from './handlers/job-handler.decorator';
import { Runner } from './handlers/runner';
import { HeartbeatService } from './heartbeat/heartbeat.service';
import { Enqueuer } from './jobs/enqueuer';
import { JobEnqueue } from './jobs/job-enqueue';
import { JobReader } from './jobs/job-reader';
import { JobSteering } from './jobs/job-steering';
import { JobWaiter } from './jobs/job-waiter';
import { JobsService } from './jobs/jobs.service';
import { FinalFailures } from './handlers/final-failures';
import { LeaseTools } from './handlers/lease-tools';
import { QueuesService } from './queues/queues.service';
import { LeaderCronExplorer } from './leader/leader-cron.explorer';
import { bindLeader } from './leader/leader-cron.decorator';
import { LeaderService } from './leader/leader.service';
import { getLeaseToken } from './lease.tokens';
import { MaintenanceCrons } from './maintenance/maintenance-crons';
import { MaintenanceService } from './maintenance/maintenance.service';
import { RetentionService } from './maintenance/retention.service';
import { type LeaseOptions, ResolvedOptions } from './options/lease-options';
import { resolveOptions } from './options/resolve-options';
import { didYouMean } from './options/suggest';
import { RescueLoop } from './rescue/rescue-loop';
import { RescueService } from './rescue/rescue.service';
import { Saves } from './settle/saves';
import { SettleService } from './settle/settle.service';
import { Database } from './storage/database';
import { MainSession } from './storage/main-session';
import { WorkerLifecycle, WorkerParts } from './workers/worker-lifecycle';
import { WorkersService } from './workers/workers.service';

/** What users may inject. */
const PUBLIC: Type<unknown>[] = [
  JobsService,
  BatchesService,
  QueuesService,
  ClaimService,
  SettleService,
  HeartbeatService,
  RescueService,
  LeaderService,
  RetentionService,
  WorkersService,
  LeaseEvents,
  WorkerLifecycle,
];

/** Our own with `@LeaderCron` methods: they ask the leader of their own lease instance, whatever that is called. */
const CRONS: Type<object>[] = [MaintenanceCrons];

const INTERNAL: Type<unknown>[] = [
  Database,
  MainSession,
  HeldLeases,
  Exchange,
  Lanes,
  WakeUp,
  Dispatcher,
  Runner,
  HandlerRegistry,
  Enqueuer,
  JobEnqueue,
  JobReader,
  JobSteering,
  JobWaiter,
  BatchFollowUps,
  BatchWriter,
  BatchReader,
  BatchSteering,
  BatchSweep,
  Saves,
  LeaseTools,
  FinalFailures,
  LeaderCronExplorer,
  MaintenanceService,
  ...CRONS,
  RescueLoop,
  WorkerParts,
];

export interface LeaseAsyncOptions extends Pick<ModuleMetadata, 'imports'> {
  /** Instance name; stands here, since tokens depend on it. Default 'default'. */
  name?: string;
  inject?: (string | symbol | Type<unknown>)[];
  useFactory: (...args: never[]) => Promise<Omit<LeaseOptions, 'name'>> | Omit<LeaseOptions, 'name'>;
}

/**
 * Background jobs in PostgreSQL under leases. Import it once per instance name, beside `ScheduleModule.forRoot()`; its services can
 * then be injected anywhere.
 */
@Module({})
export class LeaseModule implements OnModuleInit, OnApplicationBootstrap, OnModuleDestroy, OnApplicationShutdown {
  constructor(
    private readonly options: ResolvedOptions,
    private readonly lifecycle: WorkerLifecycle,
    private readonly modules: ModulesContainer,
    private readonly moduleRef: ModuleRef,
  ) {
    this.comeLastAndGoFirst();
    this.refuseSecond();
  }

  static forRoot(this: void, options: LeaseOptions): DynamicModule {
    const calledAt = callerOf(LeaseModule.forRoot);
    return build(options?.name, { useFactory: () => resolveOptions(options, calledAt) });
  }

  static forRootAsync(this: void, { name, imports, inject, useFactory }: LeaseAsyncOptions): DynamicModule {
    const calledAt = callerOf(LeaseModule.forRootAsync);
    return build(
      name,
      {
        inject: inject ?? [],
        useFactory: async (...args: never[]) => {
          const options: Partial<LeaseOptions> = await useFactory(...args);
          if (options?.name !== undefined && options.name !== name) {
            throw new InvalidOptionError(
              `name = ${JSON.stringify(options.name)} comes too late from the factory: tokens depend on it, so it stands beside useFactory`,
            );
          }
          return resolveOptions({ ...(options as LeaseOptions), ...(name === undefined ? {} : { name }) }, calledAt);
        },
      },
      imports,
    );
  }

  async onModuleInit(): Promise<void> {
    const registry = this.moduleRef.get(HandlerRegistry);
    registry.explore();
    this.refuseUnknownInstances();
    if (this.options.role !== 'producer') this.bindLeaderCrons();
    await this.moduleRef.get(Database).open();
  }

  /** Every other module's `onApplicationBootstrap` has run by now: the first job may be claimed (F:J7). */
  async onApplicationBootstrap(): Promise<void> {
    try {
      await this.lifecycle.start();
    } catch (error) {
      // The boot has failed, and Nest calls no shutdown hooks then: no instance may go on working.
      await Promise.allSettled(this.instancesOf(WorkerLifecycle).map((lifecycle) => lifecycle.close()));
      throw error;
    }
  }

  /** Before any other module's `onModuleDestroy` can close a database that handlers use (F:J1); all instances at once. */
  async onModuleDestroy(): Promise<void> {
    await Promise.all(this.instancesOf(WorkerLifecycle).map((lifecycle) => lifecycle.drain()));
  }

  async onApplicationShutdown(): Promise<void> {
    await this.lifecycle.close();
  }

  /**
   * Nest runs start hooks from the farthest module to the nearest and stop hooks the other way round; by distance alone ours would
   * come somewhere in between. Nearest of all means: last to start, first to stop.
   */
  private comeLastAndGoFirst(): void {
    for (const module of this.modules.values()) if (module.metatype === LeaseModule) module.distance = -1;
  }

  private refuseSecond(): void {
    const others = this.all().filter((options) => options.name === this.options.name && options !== this.options);
    const [other] = others;
    if (!other) return;
    throw new LeaseSetupError(
      `LeaseModule is imported twice for instance '${this.options.name}': forRoot was called at ${other.calledAt} and at ${this.options.calledAt}. ` +
        "Import it once (its services are global), or give one of them another 'name'",
    );
  }

  /** The options of all LeaseModules of this application that are made so far. */
  private all(): ResolvedOptions[] {
    // What is still to come from an asynchronous factory has no name yet.
    return this.instancesOf(ResolvedOptions).filter(({ name }) => name !== undefined);
  }

  /** The services of this class of all LeaseModules of this application. */
  private instancesOf<T>(service: abstract new (...args: never[]) => T): T[] {
    const found: T[] = [];
    for (const module of this.modules.values()) {
      const instance: unknown =
        module.metatype === LeaseModule ? module.providers.get(service as Type<T>)?.instance : undefined;
      if (instance) found.push(instance as T);
    }
    return found;
  }

  private refuseUnknownInstances(): void {
    const names = this.all().map(({ name }) => name);
    for (const module of this.modules.values()) {
      for (const wrapper of module.providers.values()) {
        const type = handlerTypeOf(wrapper);
        const metadata = type && handlerMetadata(type);
        const wanted = metadata?.options.instance ?? 'default';
        if (metadata && !names.includes(wanted)) {
          throw new LeaseSetupError(
            `@JobHandler(${JSON.stringify(metadata.kind)}) on ${type?.name}: there is no lease instance '${wanted}' in this application${didYouMean(wanted, names)}. There is: ${names.join(', ')}`,
          );
        }
      }
    }
  }

  private bindLeaderCrons(): void {
    try {
      this.moduleRef.get(SchedulerRegistry, { strict: false });
    } catch {
      throw new LeaseSetupError(
        "LeaseModule needs @nestjs/schedule for its maintenance: add ScheduleModule.forRoot() to your root module's imports, once",
      );
    }
    const leader = this.moduleRef.get(LeaderService);
    const asked = this.moduleRef.get(LeaderCronExplorer).bind(this.options.name, leader, CRONS);
    for (const own of CRONS) bindLeader(this.moduleRef.get(own), 'default', leader);
    const names = this.all().map(({ name }) => name);
    for (const name of asked) {
      if (!names.includes(name)) {
        throw new LeaseSetupError(
          `@LeaderCron asks for lease instance '${name}', which this application does not have${didYouMean(name, names)}`,
        );
      }
    }
  }
}

function build(
  name: string | undefined,
  options: { inject?: unknown[]; useFactory: (...args: never[]) => unknown },
  imports: ModuleMetadata['imports'] = [],
): DynamicModule {
  const aliases: Provider[] =
    name === undefined || name === 'default'
      ? []
      : PUBLIC.map((service) => ({ provide: getLeaseToken(service, name), useExisting: service }));
  return {
    module: LeaseModule,
    global: true,
    imports: [DiscoveryModule, ...imports],
    providers: [{ provide: ResolvedOptions, ...options } as Provider, ...PUBLIC, ...INTERNAL, ...aliases],
    exports: aliases.length > 0 ? aliases.map((alias) => (alias as { provide: string }).provide) : PUBLIC,
  };
}

/** "file:line" of the code that called `below`. */
function callerOf(below: (...args: never[]) => unknown): string {
  const holder: { stack?: string } = {};
  Error.captureStackTrace(holder, below);
  return holder.stack?.split('\n')[1]?.trim().replace(/^at /, '') ?? 'an unknown place';
}
