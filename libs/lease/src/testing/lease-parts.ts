import type { Type } from '@nestjs/common';
import { ModuleRef, type ModulesContainer } from '@nestjs/core';
import { BatchFollowUps } from '../batches/batch-follow-ups';
import { WakeUp } from '../claim/wake-up';
import { LeaseSetupError } from '../errors';
import { LeaseEvents } from '../events/lease-events';
import { FinalFailures } from '../handlers/final-failures';
import { HandlerRegistry } from '../handlers/handler-registry';
import { HeartbeatService } from '../heartbeat/heartbeat.service';
import { JobReader } from '../jobs/job-reader';
import { LeaseModule } from '../lease.module';
import { ResolvedOptions } from '../options/lease-options';
import { didYouMean } from '../options/suggest';
import { RescueService } from '../rescue/rescue.service';
import { Saves } from '../settle/saves';
import { Database } from '../storage/database';

/** The services of one lease instance that the kit works with, or makes its own ones of. */
export interface LeaseParts {
  options: ResolvedOptions;
  database: Database;
  registry: HandlerRegistry;
  reader: JobReader;
  rescue: RescueService;
  events: LeaseEvents;
  /** Resolves when every `onFailed` that was called by now has ended. */
  failuresTold: () => Promise<void>;
  saves: Saves;
  heartbeat: HeartbeatService;
  wakeUp: WakeUp;
  followUps: BatchFollowUps;
  moduleRef: ModuleRef;
}

/** @throws LeaseSetupError if the application has no lease instance of this name */
export function leaseParts(modules: ModulesContainer, name: string): LeaseParts {
  const names: string[] = [];
  for (const module of modules.values()) {
    if (module.metatype !== LeaseModule) continue;
    const get = <T>(type: abstract new (...args: never[]) => T): T =>
      module.providers.get(type as Type<T>)?.instance as T;
    const options = get(ResolvedOptions);
    if (options?.name === name) {
      return {
        options,
        database: get(Database),
        registry: get(HandlerRegistry),
        reader: get(JobReader),
        rescue: get(RescueService),
        events: get(LeaseEvents),
        failuresTold: watched(get(FinalFailures)),
        saves: get(Saves),
        heartbeat: get(HeartbeatService),
        wakeUp: get(WakeUp),
        followUps: get(BatchFollowUps),
        moduleRef: get(ModuleRef),
      };
    }
    if (options) names.push(options.name);
  }
  throw new LeaseSetupError(
    names.length === 0
      ? 'LeaseTesting: this application does not import LeaseModule, nor LeaseTestingModule'
      : `LeaseTesting: there is no lease instance '${name}' in this application${didYouMean(name, names)}. There is: ${names.join(', ')}`,
  );
}

const watches = new WeakMap<FinalFailures, () => Promise<void>>();

/** A worker does not wait for `onFailed`; a test looks at what it has done. */
function watched(failures: FinalFailures): () => Promise<void> {
  const known = watches.get(failures);
  if (known) return known;
  const running = new Set<Promise<void>>();
  const tell = failures['tell'].bind(failures);
  failures['tell'] = async (jobId, kind) => {
    const told = tell(jobId, kind);
    running.add(told);
    await told.finally(() => running.delete(told));
  };
  const all = async (): Promise<void> => void (await Promise.allSettled(running));
  watches.set(failures, all);
  return all;
}
